package mtls_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"io"
	"math/big"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

func mustCA(t testing.TB, td string) *devca.CA {
	t.Helper()
	ca, err := devca.Open(t.TempDir(), td, nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func id(t testing.TB, s string) spiffeid.ID {
	t.Helper()
	v, err := spiffeid.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func issue(t testing.TB, ca *devca.CA, name string) *mtls.SVID {
	t.Helper()
	v, err := ca.Issue(id(t, "spiffe://"+ca.TrustDomain()+"/ns/t/sa/"+name), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func served(p uint16) bool { return p == 8080 || p == 5432 }

// refuser keeps what a server configuration says of a refused hello.
type refuser struct {
	net.Conn
	why error
}

func (r *refuser) Refuse(err error) { r.why = err }

// shake runs one handshake over loopback and then sends a byte each way, because
// in TLS 1.3 the client learns of a refusal by reading only.
func shake(t testing.TB, client, server *tls.Config) (cs, ss tls.ConnectionState, cerr, serr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			serr = err
			return
		}
		r := &refuser{Conn: c}
		s := tls.Server(r, server)
		defer s.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		if serr = s.Handshake(); serr == nil {
			ss = s.ConnectionState()
			_, serr = s.Write([]byte{1})
		}
		if r.why != nil {
			serr = r.why
		}
		c.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, c)
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(10 * time.Second))
	s := tls.Client(c, client)
	if cerr = s.Handshake(); cerr == nil {
		cs = s.ConnectionState()
		_, cerr = s.Read(make([]byte, 1))
	}
	s.Close()
	<-done
	return
}

func TestHandshake(t *testing.T) {
	ca, other := mustCA(t, "mesh.test"), mustCA(t, "mesh.test") // same name, another key
	foreign := mustCA(t, "foreign.test")
	web, cart := issue(t, ca, "web"), issue(t, ca, "cart")
	late := func() time.Time { return time.Now().Add(2 * time.Hour) }
	// A pod of trust domain mesh.test whose bundle, by mistake, trusts another domain's CA too.
	wide := *cart
	wide.Roots = ca.Roots()
	addCA(t, wide.Roots, foreign)
	fweb := issue(t, foreign, "web")
	fweb.Roots = ca.Roots()

	for _, tt := range []struct {
		name           string
		client         mtls.Client
		noPin          bool
		server         mtls.Server
		cfg            func(c, s *tls.Config)
		cerr, serr     any    // pointer to the wanted error type; nil: no error
		remote         string // alert the client must have seen
		alpn           string
		caller, called string
	}{
		{name: "h2", client: mtls.Client{ALPN: []string{"h2"}}, alpn: "h2", caller: "web", called: "cart"},
		{name: "raw", caller: "web", called: "cart"},
		{name: "wrong pin", client: mtls.Client{Pin: web.ID}, cerr: new(*mtls.WrongPeer)},
		{name: "no pin", noPin: true, cerr: new(*mtls.WrongPeer)},
		{name: "client untrusted", client: mtls.Client{SVID: mix(issue(t, other, "web"), ca)}, serr: new(*mtls.Untrusted), remote: "bad certificate"},
		{name: "server untrusted", server: mtls.Server{SVID: always(mix(issue(t, other, "cart"), ca))}, cerr: new(*mtls.Untrusted)},
		{name: "foreign client", client: mtls.Client{SVID: fweb}, server: mtls.Server{SVID: always(&wide)}, serr: new(*mtls.ForeignTrustDomain), remote: "bad certificate"},
		{name: "server expired", client: mtls.Client{Now: late}, cerr: new(*mtls.Expired)},
		{name: "client expired", server: mtls.Server{Now: late}, serr: new(*mtls.Expired), remote: "bad certificate"},
		{name: "client without certificate", cfg: func(c, s *tls.Config) { c.GetClientCertificate = nil }, serr: new(error), remote: "certificate required"},
		{name: "server without certificate", server: mtls.Server{SVID: always(nil)}, serr: new(*mtls.NoCertificate), remote: "internal error"},
		{name: "unserved port", client: mtls.Client{SNI: "9090"}, serr: new(*mtls.UnknownSNI), remote: "unrecognized name"},
		{name: "name for a port", client: mtls.Client{SNI: "8080.cart.t.aether.internal"}, serr: new(*mtls.UnknownSNI), remote: "unrecognized name"},
		{name: "name for a port, compat", client: mtls.Client{SNI: "8080.cart.t.aether.internal"}, server: mtls.Server{Compat: true}, caller: "web", called: "cart"},
		{name: "any name, named", client: mtls.Client{SNI: "aether-registrar.aether-system.svc"}, server: mtls.Server{Named: true}, caller: "web", called: "cart"},
		{name: "client untrusted, named", client: mtls.Client{SVID: mix(issue(t, other, "web"), ca)}, server: mtls.Server{Named: true}, serr: new(*mtls.Untrusted), remote: "bad certificate"},
		{name: "no SNI", cfg: func(c, s *tls.Config) { c.ServerName = "" }, serr: new(*mtls.UnknownSNI), remote: "unrecognized name"},
		{name: "TLS 1.2", cfg: func(c, s *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }, serr: new(error), remote: "protocol version"},
		{name: "TLS 1.2, compat", server: mtls.Server{Compat: true}, cfg: func(c, s *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }, caller: "web", called: "cart"},
		{name: "Envoy-based server selects no ALPN", client: mtls.Client{ALPN: []string{"h2"}}, cfg: func(c, s *tls.Config) {
			get := s.GetConfigForClient
			s.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
				cfg, err := get(h)
				cfg = cfg.Clone()
				cfg.NextProtos = nil
				return cfg, err
			}
		}, caller: "web", called: "cart"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := tt.client, tt.server
			if c.SVID == nil {
				c.SVID = web
			}
			if c.SNI == "" {
				c.SNI = "8080"
			}
			if c.Pin.IsZero() && !tt.noPin {
				c.Pin = cart.ID
			}
			if s.SVID == nil {
				s.SVID = always(cart)
			}
			s.Serves = func(p uint16) bool { return served(p) || p == 0 }
			cc, sc := mtls.ClientConfig(c), mtls.ServerConfig(s)
			if tt.cfg != nil {
				tt.cfg(cc, sc)
			}
			cs, ss, cerr, serr := shake(t, cc, sc)
			if tt.cerr != nil && (cerr == nil || !errors.As(cerr, tt.cerr)) {
				t.Errorf("client: %v, want a %T", cerr, tt.cerr)
			}
			if tt.serr != nil && (serr == nil || !errors.As(serr, tt.serr)) {
				t.Errorf("server: %v, want a %T", serr, tt.serr)
			}
			if tt.remote != "" && (cerr == nil || !strings.Contains(cerr.Error(), tt.remote)) {
				t.Errorf("client: %v, want the alert %q", cerr, tt.remote)
			}
			if tt.cerr != nil || tt.serr != nil {
				if cerr == nil && serr == nil {
					t.Fatal("it was let through")
				}
				return
			}
			if cerr != nil || serr != nil {
				t.Fatal(cerr, serr)
			}
			if cs.NegotiatedProtocol != tt.alpn || ss.NegotiatedProtocol != tt.alpn {
				t.Errorf("ALPN %q/%q, want %q", cs.NegotiatedProtocol, ss.NegotiatedProtocol, tt.alpn)
			}
			if cs.Version == tls.VersionTLS13 && cs.CurveID != tls.X25519MLKEM768 {
				t.Errorf("key exchange %v", cs.CurveID)
			}
			caller, _ := mtls.PeerID(&ss)
			called, _ := mtls.PeerID(&cs)
			if !strings.HasSuffix(caller.Path(), tt.caller) || !strings.HasSuffix(called.Path(), tt.called) {
				t.Errorf("%s > %s", caller, called)
			}
		})
	}
}

func always(s *mtls.SVID) func() *mtls.SVID { return func() *mtls.SVID { return s } }

// mix gives an SVID another CA's bundle, so that it can judge that CA's peers.
func mix(s *mtls.SVID, ca *devca.CA) *mtls.SVID {
	c := *s
	c.Roots = ca.Roots()
	return &c
}

func addCA(t *testing.T, pool *x509.CertPool, ca *devca.CA) {
	t.Helper()
	if !pool.AppendCertsFromPEM(ca.Bundle()) {
		t.Fatal("no certificate in the bundle")
	}
}

// A certificate that looks right in everything but how it was made: no bundle
// must never mean the system's roots.
func TestNoBundle(t *testing.T) {
	ca := mustCA(t, "mesh.test")
	web, cart := *issue(t, ca, "web"), issue(t, ca, "cart")
	web.Roots = nil
	_, _, cerr, _ := shake(t, mtls.ClientConfig(mtls.Client{SVID: &web, SNI: "8080", Pin: cart.ID}),
		mtls.ServerConfig(mtls.Server{SVID: always(cart), Serves: served}))
	if bad := new(*mtls.Untrusted); !errors.As(cerr, bad) {
		t.Errorf("got %v", cerr)
	}
}

// Resumption would skip nothing here, but it must not happen at all.
func TestNothingIsResumed(t *testing.T) {
	ca := mustCA(t, "mesh.test")
	web, cart := issue(t, ca, "web"), issue(t, ca, "cart")
	for _, compat := range []bool{false, true} {
		cc := mtls.ClientConfig(mtls.Client{SVID: web, SNI: "8080", Pin: cart.ID})
		cc.SessionTicketsDisabled = false
		cc.ClientSessionCache = tls.NewLRUClientSessionCache(4) // a client that wants to
		if compat {
			cc.MinVersion, cc.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
		}
		sc := mtls.ServerConfig(mtls.Server{SVID: always(cart), Serves: served, Compat: compat})
		for range 3 {
			cs, ss, cerr, serr := shake(t, cc, sc)
			if cerr != nil || serr != nil {
				t.Fatal(cerr, serr)
			}
			if cs.DidResume || ss.DidResume {
				t.Error("resumed")
			}
		}
	}
}

func TestBundleRotation(t *testing.T) { // cases 119: A, then B and A, then B
	a, b := mustCA(t, "mesh.test"), mustCA(t, "mesh.test")
	both := a.Roots()
	addCA(t, both, b)
	with := func(s *mtls.SVID, roots *x509.CertPool) *mtls.SVID { c := *s; c.Roots = roots; return &c }
	cart := with(issue(t, a, "cart"), a.Roots())
	sc := mtls.ServerConfig(mtls.Server{SVID: func() *mtls.SVID { return cart }, Serves: served})
	try := func(web *mtls.SVID) error {
		_, _, cerr, serr := shake(t, mtls.ClientConfig(mtls.Client{SVID: web, SNI: "8080", Pin: cart.ID}), sc)
		return errors.Join(cerr, serr)
	}
	oldWeb, newWeb := issue(t, a, "web"), issue(t, b, "web")
	for i, step := range []struct {
		cart, web *mtls.SVID
		ok        bool
	}{
		{with(issue(t, a, "cart"), a.Roots()), with(oldWeb, a.Roots()), true},
		{with(issue(t, a, "cart"), both), with(oldWeb, a.Roots()), true},
		{with(issue(t, a, "cart"), both), with(newWeb, both), true},
		{with(issue(t, b, "cart"), both), with(oldWeb, both), true},
		{with(issue(t, b, "cart"), b.Roots()), with(newWeb, b.Roots()), true},
		{with(issue(t, b, "cart"), b.Roots()), with(oldWeb, both), false},
	} {
		cart = step.cart
		if err := try(step.web); (err == nil) != step.ok {
			t.Errorf("step %d: %v", i, err)
		}
	}
}

func TestParseSNI(t *testing.T) {
	for _, tt := range []struct {
		sni            string
		strict, compat uint16
		ok, okCompat   bool
	}{
		{"8080", 8080, 8080, true, true},
		{"1", 1, 1, true, true},
		{"65535", 65535, 65535, true, true},
		{"", 0, 0, false, true},
		{"0", 0, 0, false, false},
		{"65536", 0, 0, false, false},
		{"08080", 0, 0, false, false},
		{"+80", 0, 0, false, false},
		{"-80", 0, 0, false, false},
		{"80 ", 0, 0, false, false},
		{"cart", 0, 0, false, false},
		{"8080.", 0, 0, false, false},
		{"8080.cart.shop.aether.internal", 0, 8080, false, true},
		{"x8080.cart", 0, 0, false, false},
		{".8080", 0, 0, false, false},
	} {
		if p, ok := mtls.ParseSNI(tt.sni, false); p != tt.strict || ok != tt.ok {
			t.Errorf("%q: %d %v", tt.sni, p, ok)
		}
		if p, ok := mtls.ParseSNI(tt.sni, true); p != tt.compat || ok != tt.okCompat {
			t.Errorf("%q compat: %d %v", tt.sni, p, ok)
		}
	}
}

func TestXFCC(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tm := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "a \"b\"\r\nx-evil: 1;é", Organization: []string{"SPIRE"}, Country: []string{"US"}},
		URIs:         []*url.URL{{Scheme: "spiffe", Host: "td", Path: "/ns/a/sa/a"}},
	}
	der, err := x509.CreateCertificate(rand.Reader, tm, tm, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(der)
	want := `By=spiffe://td/ns/b/sa/b;Hash=` + hex.EncodeToString(sum[:]) +
		`;Subject="CN=a \"b\"\0D\0Ax-evil: 1\;\C3\A9,O=SPIRE,C=US";URI=spiffe://td/ns/a/sa/a`
	if got := mtls.XFCC(id(t, "spiffe://td/ns/b/sa/b"), c); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestNewSVID(t *testing.T) {
	ca, other := mustCA(t, "mesh.test"), mustCA(t, "mesh.test")
	good, second := issue(t, ca, "web"), issue(t, ca, "web")
	now := time.Now()
	for _, tt := range []struct {
		name  string
		cert  tls.Certificate
		roots []*x509.Certificate
		now   time.Time
		err   string
	}{
		{"good", good.Cert, good.Authorities, now, ""},
		{"mixed", tls.Certificate{Certificate: good.Cert.Certificate, PrivateKey: second.Cert.PrivateKey}, good.Authorities, now, "not the certificate's"},
		{"no key", tls.Certificate{Certificate: good.Cert.Certificate}, good.Authorities, now, "no private key"},
		{"no chain", tls.Certificate{PrivateKey: good.Cert.PrivateKey}, good.Authorities, now, "empty"},
		{"no bundle", good.Cert, nil, now, "bundle is empty"},
		{"empty bundle", good.Cert, []*x509.Certificate{}, now, "bundle is empty"},
		{"other CA", good.Cert, issue(t, other, "web").Authorities, now, "not trusted"},
		{"expired", good.Cert, good.Authorities, now.Add(2 * time.Hour), "does not hold"},
	} {
		s, err := mtls.NewSVID(tt.cert, tt.roots, tt.now)
		if tt.err == "" && (err != nil || s.ID != good.ID || !s.NotAfter.Equal(good.NotAfter) || s.TrustDomain != "mesh.test" || s.Cert.Leaf == nil) ||
			tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: %v, %v", tt.name, s, err)
		}
	}
}

var _ mtls.Source = sourceFunc(nil)

type sourceFunc func(context.Context, mtls.Ref, func(*mtls.SVID, error)) error

func (f sourceFunc) Watch(ctx context.Context, r mtls.Ref, on func(*mtls.SVID, error)) error {
	return f(ctx, r, on)
}
