package record

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/e2e/testseed"
)

func certificate(t testing.TB) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tm := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "x"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tm, tm, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// configs of a client and a server as package mtls makes them, verification aside.
func configs(t testing.TB) (client, server *tls.Config) {
	c := certificate(t)
	client = &tls.Config{Certificates: []tls.Certificate{c}, InsecureSkipVerify: true, SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true}
	server = client.Clone()
	server.ClientAuth = tls.RequireAnyClientCert
	return
}

func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	type accepted struct {
		c   net.Conn
		err error
	}
	ch := make(chan accepted, 1)
	go func() { c, err := l.Accept(); ch <- accepted{c, err} }()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s := <-ch
	if s.err != nil {
		t.Fatal(s.err)
	}
	t.Cleanup(func() { c.Close(); s.c.Close() })
	return c.(*net.TCPConn), s.c.(*net.TCPConn)
}

// pair shakes hands and flips both ends.
func pair(t testing.TB, cm, sm Maker, mod func(c, s *tls.Config)) (client, server Conn) {
	t.Helper()
	client, server, _ = pairOn(t, cm, sm, mod)
	return
}

// pairOn is pair that keeps the client's socket.
func pairOn(t testing.TB, cm, sm Maker, mod func(c, s *tls.Config)) (client, server Conn, sock net.Conn) {
	t.Helper()
	cc, sc := configs(t)
	if mod != nil {
		mod(cc, sc)
	}
	a, b := tcpPair(t)
	cs, ss := Client(a, cc, cm), Server(b, sc, sm)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- ss.Handshake(ctx) }()
	if err := errors.Join(cs.Handshake(ctx), <-done); err != nil {
		t.Fatal(err)
	}
	return cs.Flip(), ss.Flip(), a
}

// drain reads until the Conn wants more or ends.
func drain(c Conn, p []byte) (out []byte, err error) {
	for {
		n, err := c.Read(p)
		out = append(out, p[:n]...)
		if err != nil {
			return out, err
		}
		if n == 0 {
			panic("0 bytes and no error")
		}
	}
}

var makers = map[string]Maker{"std": Std, "own": Own}

func each(t *testing.T, f func(t *testing.T, cm, sm Maker)) {
	for cn, cm := range makers {
		for sn, sm := range makers {
			t.Run(cn+" to "+sn, func(t *testing.T) { f(t, cm, sm) })
		}
	}
}

func random(r *mrand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// The stream that comes out is the stream that went in, however it is cut, by
// sealer, network and reader, in both directions at once.
func TestChopped(t *testing.T) {
	each(t, func(t *testing.T, cm, sm Maker) {
		client, server := pair(t, cm, sm, nil)
		r := testseed.Rand(t)
		var wg sync.WaitGroup
		for _, d := range []struct{ from, to Conn }{{client, server}, {server, client}} {
			r := mrand.New(mrand.NewPCG(r.Uint64(), 2))
			wg.Go(func() {
				var sent, got []byte
				var wire []byte
				for range 60 {
					p := random(r, []int{1, 3, 100, 16384, 16385, 70000}[r.IntN(6)])
					sent = append(sent, p...)
					var err error
					if wire, err = d.from.Seal(wire[:0], p); err != nil {
						t.Error(err)
						return
					}
					for len(wire) > 0 {
						n := min(len(wire), []int{1, 4, 5, 6, 1000, 16406, 100000}[r.IntN(7)])
						d.to.Feed(slices.Clone(wire[:n]))
						wire = wire[n:]
						if r.IntN(8) == 0 && len(wire) > 0 { // fed again before it asked
							b := make([]byte, 1+r.IntN(50))
							k, err := d.to.Read(b)
							if err != nil && err != ErrMore {
								t.Error(err)
								return
							}
							got = append(got, b[:k]...)
							d.to.Feed(slices.Clone(wire[:1]))
							wire = wire[1:]
						}
						out, err := drain(d.to, make([]byte, 1+r.IntN(40000)))
						got = append(got, out...)
						if err != ErrMore {
							t.Error(err)
							return
						}
					}
				}
				if !bytes.Equal(sent, got) {
					t.Errorf("%d bytes sent, %d others came", len(sent), len(got))
				}
				d.to.Feed(d.from.CloseNotify(nil))
				if _, err := d.to.Read(make([]byte, 1)); err != io.EOF {
					t.Errorf("after close_notify: %v", err)
				}
				if b := d.from.CloseNotify(nil); len(b) != 0 {
					t.Error("close_notify twice")
				}
				if _, err := d.from.Seal(nil, []byte{1}); err == nil {
					t.Error("sealed after close_notify")
				}
			})
		}
		wg.Wait()
	})
}

// What one write of the peer put behind its handshake must not be lost.
func TestReadAhead(t *testing.T) {
	each(t, func(t *testing.T, cm, sm Maker) {
		cc, sc := configs(t)
		a, b := tcpPair(t)
		// The client holds its last flight back until its first data is behind it.
		held := &holdConn{Conn: a}
		cs, ss := Client(held, cc, cm), Server(b, sc, sm)
		done := make(chan error, 1)
		go func() { done <- ss.Handshake(t.Context()) }()
		if err := cs.Handshake(t.Context()); err != nil {
			t.Fatal(err)
		}
		c := cs.Flip()
		wire, err := c.Seal(held.held, []byte("early bird"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Write(wire); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		got, err := drain(ss.Flip(), make([]byte, 4))
		if string(got) != "early bird" || err != ErrMore {
			t.Errorf("%q, %v", got, err)
		}
	})
}

type holdConn struct {
	net.Conn
	writes int
	held   []byte
}

func (h *holdConn) Write(p []byte) (int, error) {
	if h.writes++; h.writes == 1 { // ClientHello
		return h.Conn.Write(p)
	}
	h.held = append(h.held, p...)
	return len(p), nil
}

// Pins what Std leans on: crypto/tls goes on after a temporary net.Error wherever
// it came in a record, and writes what the spec demands meanwhile through the
// same transport.
func TestStdResumesAtEveryByte(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		client, server := pair(t, Std, Std, func(c, s *tls.Config) { c.MaxVersion, s.MaxVersion = version, version })
		wire, err := client.Seal(nil, []byte("one"))
		if err == nil {
			wire, err = client.Seal(wire, []byte("two"))
		}
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		for i := range wire {
			server.Feed(wire[i : i+1])
			out, err := drain(server, make([]byte, 8))
			if err != ErrMore {
				t.Fatalf("byte %d: %v on %s", i, err, runtime.Version())
			}
			got = append(got, out...)
		}
		if string(got) != "onetwo" {
			t.Fatalf("got %q on %s", got, runtime.Version())
		}
	}
}

// One Seal makes as few records as can be.
func TestRecordSizes(t *testing.T) {
	each(t, func(t *testing.T, cm, sm Maker) {
		client, _ := pair(t, cm, sm, nil)
		wire, err := client.Seal(nil, make([]byte, 100000))
		if err != nil {
			t.Fatal(err)
		}
		var lens []int
		for len(wire) > 0 {
			n := int(binary.BigEndian.Uint16(wire[3:]))
			lens = append(lens, n-17)
			wire = wire[5+n:]
		}
		if want := []int{16384, 16384, 16384, 16384, 16384, 16384, 1696}; !slices.Equal(lens, want) {
			t.Errorf("records of %v, want %v", lens, want)
		}
	})
}

func own(t *testing.T, c Conn) *engine {
	t.Helper()
	e, ok := c.(*engine)
	if !ok {
		t.Fatalf("%T is not the own maker's", c)
	}
	return e
}

// Both makers answer key updates of the other and carry on, again and again.
func TestKeyUpdate(t *testing.T) {
	for name, m := range makers {
		t.Run(name, func(t *testing.T) {
			client, server := pair(t, Own, m, nil)
			e := own(t, client)
			for i := range 5 {
				// An update that asks for one in return.
				wire, err := client.Seal(e.Rekey(nil), []byte("after"))
				if err != nil {
					t.Fatal(err)
				}
				server.Feed(wire)
				if got, err := drain(server, make([]byte, 64)); string(got) != "after" || err != ErrMore {
					t.Fatalf("%q, %v", got, err)
				}
				if !server.Pending() {
					t.Fatal("no answer pending")
				}
				var back []byte
				if i%2 == 0 {
					back = server.Take(nil)
				}
				if back, err = server.Seal(back, []byte("answer")); err != nil {
					t.Fatal(err)
				}
				if server.Pending() {
					t.Error("still pending")
				}
				client.Feed(back)
				if got, err := drain(client, make([]byte, 64)); string(got) != "answer" || err != ErrMore {
					t.Fatalf("%q, %v", got, err)
				}
				if client.Pending() {
					t.Error("an answer to an answer")
				}
			}
		})
	}
}

// One key does not seal more records than AES-GCM may.
func TestRekey(t *testing.T) {
	for name, m := range makers {
		t.Run(name, func(t *testing.T) {
			client, server := pair(t, Own, m, nil)
			e := own(t, client)
			e.out.seq = rekeyAfter - 1
			// The peer has seen as many.
			switch s := server.(type) {
			case *engine:
				s.in.seq = rekeyAfter - 1
			case *stdConn:
				t.Log("crypto/tls keeps its count to itself: the first record cannot be read")
				e.out.seq = rekeyAfter
				wire, err := client.Seal(nil, []byte("x"))
				if err != nil || len(wire) < 2*(Head+Tail) || e.out.seq != 1 {
					t.Fatalf("%d bytes, next number %d, %v", len(wire), e.out.seq, err)
				}
				return
			}
			for range 3 {
				wire, err := client.Seal(nil, []byte("x"))
				if err != nil {
					t.Fatal(err)
				}
				server.Feed(wire)
				if got, err := drain(server, make([]byte, 64)); string(got) != "x" || err != ErrMore {
					t.Fatalf("%q, %v", got, err)
				}
			}
			if e.out.seq != 2 {
				t.Errorf("the key was not changed: next number %d", e.out.seq)
			}
			e.out.seq, own(t, server).in.seq = rekeyAfter, rekeyAfter
			if !client.Pending() {
				t.Error("Take is not asked for a key update")
			}
		})
	}
}

// A peer that asks for more and more answers is cut off, not remembered.
func TestKeyUpdateFlood(t *testing.T) {
	for name, m := range makers {
		t.Run(name, func(t *testing.T) {
			client, server := pair(t, Own, m, nil)
			e := own(t, client)
			var err error
			for range 1000 {
				wire := e.sealLocked(e.Rekey(nil), typeApplicationData, []byte("x")) // else they count as useless
				server.Feed(wire)
				if _, err = drain(server, make([]byte, 64)); err != ErrMore {
					break
				}
			}
			if n := len(server.Take(nil)); n > maxPending {
				t.Errorf("%d bytes pending", n)
			}
			wire := []byte{}
			for range 2 * maxUseless {
				wire = e.sealLocked(wire, typeHandshake, []byte{msgKeyUpdate, 0, 0, 1, 0})
				if err := e.out.update(); err != nil {
					t.Fatal(err)
				}
			}
			server.Feed(wire)
			if _, err := drain(server, make([]byte, 64)); err == ErrMore || err == io.EOF {
				t.Errorf("updates without data: %v", err)
			}
		})
	}
}

// Own judges a peer's records as RFC 8446 says, and tells it so.
func TestViolations(t *testing.T) {
	seal := func(typ byte, p ...byte) func(*engine) []byte {
		return func(e *engine) []byte { return e.sealLocked(nil, typ, p) }
	}
	for _, tt := range []struct {
		name  string
		wire  func(e *engine) []byte
		alert string
	}{
		{"bit flip", func(e *engine) []byte {
			b := e.sealLocked(nil, typeApplicationData, []byte("x"))
			b[7] ^= 1
			return b
		}, "bad record MAC"},
		{"too long on the wire", func(*engine) []byte { return []byte{23, 3, 3, 0x41, 0x01} }, "record overflow"},
		{"too long inside", func(e *engine) []byte {
			return e.sealLocked(nil, typeApplicationData, make([]byte, MaxPlain+1))
		}, "record overflow"},
		{"clear text", func(*engine) []byte { return []byte{22, 3, 3, 0, 1, 0} }, "unexpected message"},
		{"change_cipher_spec", func(*engine) []byte { return []byte{20, 3, 3, 0, 1, 1} }, "unexpected message"},
		{"unknown type", seal(99, 1), "unexpected message"},
		{"only padding", seal(0), "unexpected message"},
		{"empty handshake", seal(typeHandshake), "unexpected message"},
		{"hello again", seal(typeHandshake, 1, 0, 0, 1, 0), "unexpected message"},
		{"endless message", seal(typeHandshake, 4, 0xff, 0, 0), "unexpected message"},
		{"update with junk behind", seal(typeHandshake, 24, 0, 0, 1, 0, 4), "unexpected message"},
		{"update of two bytes", seal(typeHandshake, 24, 0, 0, 2, 0, 0), "error decoding message"},
		{"update of value 2", seal(typeHandshake, 24, 0, 0, 1, 2), "illegal parameter"},
		{"short alert", seal(typeAlert, 2), "error decoding message"},
		{"data inside a message", func(e *engine) []byte {
			return e.sealLocked(e.sealLocked(nil, typeHandshake, []byte{4, 0, 0, 9}), typeApplicationData, []byte("x"))
		}, "unexpected message"},
		{"many empties", func(e *engine) (b []byte) {
			for range maxUseless + 1 {
				b = e.sealLocked(b, typeApplicationData, nil)
			}
			return
		}, "unexpected message"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			client, server := pair(t, Own, Own, nil)
			server.Feed(tt.wire(own(t, client)))
			_, err := drain(server, make([]byte, 64))
			if err == nil || !strings.Contains(err.Error(), tt.alert) {
				t.Fatalf("got %v, want %s", err, tt.alert)
			}
			if _, again := server.Read(make([]byte, 1)); again != err {
				t.Errorf("then %v", again)
			}
			if _, err := server.Seal(nil, []byte("x")); err == nil {
				t.Error("sealed after it")
			}
		})
	}
}

// TestPostHandshakeMessages: behind the handshake either side takes a key update, and only a client, from its server, a session
// ticket (RFC 8446 4.6); whatever else there is is an unexpected message, to Own as to crypto/tls.
func TestPostHandshakeMessages(t *testing.T) {
	for typ := range 256 {
		for _, toServer := range []bool{false, true} {
			for _, m := range []Maker{Own, Std} {
				if m == Std && typ > 32 {
					continue // a handshake each: those that have a name will do
				}
				var from, to Conn
				switch {
				case m == Own:
					keys := func() *keyLog {
						return &keyLog{client: bytes.Repeat([]byte{1}, 32), server: bytes.Repeat([]byte{2}, 32)}
					}
					from = newEngine(tls.TLS_AES_128_GCM_SHA256, toServer, keys())
					to = newEngine(tls.TLS_AES_128_GCM_SHA256, !toServer, keys())
				case toServer:
					from, to = pair(t, Own, Std, nil)
				default:
					to, from = pair(t, Std, Own, nil)
				}
				body := []byte{0}
				if typ == msgNewSessionTicket { // lifetime, age_add, nonce, ticket, extensions
					body = []byte{0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 1, 'x', 0, 0}
				}
				to.Feed(own(t, from).sealLocked(nil, typeHandshake, append([]byte{byte(typ), 0, 0, byte(len(body))}, body...)))
				_, err := drain(to, make([]byte, 8))
				if takes := typ == msgKeyUpdate || typ == msgNewSessionTicket && !toServer; takes != (err == ErrMore) {
					t.Errorf("maker %d, type %d to the server %v: %v", m, typ, toServer, err)
				}
				if m == Own && err != ErrMore && (err == nil || !strings.Contains(err.Error(), "unexpected message")) {
					t.Errorf("type %d to the server %v: %v", typ, toServer, err)
				}
			}
		}
	}
}

// TestSecretsAreWiped: what the key schedule leaves behind is not there any more: the line of the key log, and the nonce of
// an earlier generation of keys.
func TestSecretsAreWiped(t *testing.T) {
	var seen []byte
	k := &keyLog{next: writerFunc(func(p []byte) (int, error) { seen = bytes.Clone(p); return len(p), nil })}
	line := []byte("CLIENT_TRAFFIC_SECRET_0 00ff 0123456789abcdef\n")
	want := bytes.Clone(line)
	if n, err := k.Write(line); n != len(line) || err != nil {
		t.Fatal(n, err)
	}
	if !bytes.Equal(seen, want) {
		t.Errorf("who asked for the key log has %q", seen)
	}
	if !bytes.Equal(line, make([]byte, len(line))) || len(k.client) != 8 {
		t.Errorf("left behind: %q; kept %x", line, k.client)
	}
	e := lone(t, Own).(*engine)
	e.out.next()
	secret := e.out.secret
	if err := e.out.update(); err != nil {
		t.Fatal(err)
	}
	if e.out.nonce != [12]byte{} || !bytes.Equal(secret, make([]byte, len(secret))) {
		t.Errorf("left behind: nonce %x, secret %x", e.out.nonce, secret)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// The alert reaches the other side, whichever maker either is.
func TestAlert(t *testing.T) {
	each(t, func(t *testing.T, cm, sm Maker) {
		client, server := pair(t, cm, sm, nil)
		wire, err := client.Seal(nil, []byte("x"))
		if err != nil {
			t.Fatal(err)
		}
		wire[8] ^= 1
		server.Feed(wire)
		if _, err := drain(server, make([]byte, 8)); !strings.Contains(err.Error(), "bad record MAC") {
			t.Fatal(err)
		}
		if !server.Pending() {
			t.Fatal("no alert pending")
		}
		alert := server.Take(nil)
		if server.Pending() {
			t.Error("still pending")
		}
		client.Feed(alert)
		if _, err := drain(client, make([]byte, 8)); !strings.Contains(err.Error(), "remote error") || !strings.Contains(err.Error(), "bad record MAC") {
			t.Errorf("client: %v", err)
		}
	})
}

// What Own does not do falls to Std.
func TestFallback(t *testing.T) {
	for _, tt := range []struct {
		name         string
		mod          func(c, s *tls.Config)
		client, serv bool // own?
	}{
		{"both", nil, true, true},
		{"TLS 1.2", func(c, s *tls.Config) { c.MaxVersion = tls.VersionTLS12 }, false, false},
		{"tickets", func(c, s *tls.Config) {
			c.SessionTicketsDisabled, s.SessionTicketsDisabled = false, false
			c.ClientSessionCache = tls.NewLRUClientSessionCache(1)
		}, true, false},
		{"by hello", func(c, s *tls.Config) {
			inner := s.Clone()
			s.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return inner, nil }
		}, true, true},
	} {
		client, server, sock := pairOn(t, Own, Own, tt.mod)
		_, c := client.(*engine)
		_, s := server.(*engine)
		if c != tt.client || s != tt.serv {
			t.Errorf("%s: own maker %v %v, want %v %v", tt.name, c, s, tt.client, tt.serv)
		}
		if tt.name == "tickets" { // they were sent in the handshake and mean nothing to us
			b := make([]byte, 4096)
			n, err := sock.Read(b)
			if err != nil {
				t.Fatal(err)
			}
			client.Feed(b[:n])
			if out, err := drain(client, make([]byte, 8)); len(out) > 0 || err != ErrMore {
				t.Errorf("tickets: %q, %v", out, err)
			}
		}
		wire, err := server.Seal(nil, []byte("hi"))
		if err != nil {
			t.Fatal(err)
		}
		client.Feed(wire)
		if got, err := drain(client, make([]byte, 8)); string(got) != "hi" || err != ErrMore {
			t.Errorf("%s: %q, %v", tt.name, got, err)
		}
	}
}

// All three suites of TLS 1.3, ours against OpenSSL's; OpenSSL also asks for key
// updates and sends tickets. It ends by closing.
func TestOpenSSL(t *testing.T) {
	if _, err := exec.LookPath("openssl"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("no openssl: install it, this test must run in CI")
		}
		t.Log("no openssl here: checked against crypto/tls only")
		return
	}
	dir := t.TempDir()
	crt := certificate(t)
	der, err := x509.MarshalPKCS8PrivateKey(crt.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	file := func(name, typ string, b []byte) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	certFile, keyFile := file("c.pem", "CERTIFICATE", crt.Certificate[0]), file("k.pem", "PRIVATE KEY", der)
	for name, m := range makers {
		for suite, isOwn := range map[string]bool{"TLS_AES_128_GCM_SHA256": m == Own, "TLS_AES_256_GCM_SHA384": m == Own, "TLS_CHACHA20_POLY1305_SHA256": false} {
			t.Run(name+" "+suite, func(t *testing.T) {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				cmd := exec.CommandContext(t.Context(), "openssl", "s_client", "-connect", l.Addr().String(), "-ciphersuites", suite, "-cert", certFile, "-key", keyFile, "-servername", "8080")
				stdin, err := cmd.StdinPipe()
				if err != nil {
					t.Fatal(err)
				}
				var out bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, io.Discard
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				defer cmd.Wait()
				c, err := l.Accept()
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				_, sc := configs(t)
				ss := Server(c, sc, m)
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				if err := ss.Handshake(ctx); err != nil {
					t.Fatal(err)
				}
				if got := ss.State().ServerName; got != "8080" {
					t.Errorf("server name %q", got)
				}
				rec := ss.Flip()
				if _, ok := rec.(*engine); ok != isOwn {
					t.Errorf("the maker is %T", rec)
				}
				c.SetDeadline(time.Now().Add(10 * time.Second))
				read := func(want string) {
					t.Helper()
					var got []byte
					b := make([]byte, 1000)
					for len(got) < len(want) {
						n, err := c.Read(b)
						if err != nil {
							t.Fatal(err)
						}
						rec.Feed(b[:n])
						out, err := drain(rec, make([]byte, 100))
						if err != ErrMore {
							t.Fatal(err)
						}
						got = append(got, out...)
						if _, err := c.Write(rec.Take(nil)); err != nil {
							t.Fatal(err)
						}
					}
					if string(got) != want {
						t.Errorf("got %q, want %q", got, want)
					}
				}
				io.WriteString(stdin, "hello\n")
				read("hello\n")
				io.WriteString(stdin, "K\n") // s_client: key update, and ask for one
				for b := make([]byte, 1000); !rec.Pending(); {
					n, err := c.Read(b)
					if err != nil {
						t.Fatal(err)
					}
					rec.Feed(b[:n])
					if out, err := drain(rec, make([]byte, 100)); err != ErrMore || len(out) > 0 {
						t.Fatalf("%q, %v", out, err)
					}
				}
				io.WriteString(stdin, "again\n")
				read("again\n")
				wire, err := rec.Seal(nil, []byte("reply under new keys\n"))
				if err != nil {
					t.Fatal(err)
				}
				if _, err := c.Write(rec.CloseNotify(wire)); err != nil {
					t.Fatal(err)
				}
				stdin.Close()
				cmd.Wait()
				if !strings.Contains(out.String(), "reply under new keys") {
					t.Errorf("openssl did not get the reply:\n%s", out.String())
				}
			})
		}
	}
}

// Handshakes end in time and with the reason.
func TestHandshakeEnds(t *testing.T) {
	cc, sc := configs(t)
	a, _ := tcpPair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := Client(a, cc, Std).Handshake(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("silent peer: %v", err)
	}
	_, b := tcpPair(t)
	ctx, stop := context.WithCancel(t.Context())
	go stop()
	if err := Server(b, sc, Std).Handshake(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	a, b = tcpPair(t)
	a.Write([]byte("GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
	if err := Server(b, sc, Own).Handshake(t.Context()); err == nil || !strings.Contains(err.Error(), "handshake") {
		t.Errorf("not TLS: %v", err)
	}
	a, b = tcpPair(t)
	a.Close()
	if err := Server(b, sc, Own).Handshake(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("closed: %v", err)
	}
	why := errors.New("not here")
	sc.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		h.Conn.(interface{ Refuse(error) }).Refuse(why)
		return &tls.Config{}, nil
	}
	a, b = tcpPair(t)
	done := make(chan error, 1)
	go func() { done <- Server(b, sc, Own).Handshake(t.Context()) }()
	if err := Client(a, cc, Own).Handshake(t.Context()); err == nil || !strings.Contains(err.Error(), "unrecognized name") {
		t.Errorf("client: %v", err)
	}
	if err := <-done; !errors.Is(err, why) {
		t.Errorf("server: %v", err)
	}
}

func TestInPlace(t *testing.T) {
	client, server := pair(t, Own, Own, nil)
	c, s := client.(InPlace), server.(InPlace)
	r := mrand.New(mrand.NewPCG(1, 2))
	var sent, got []byte
	buf := make([]byte, 4*(Head+MaxPlain+Tail))
	var wire []byte
	for range 200 {
		end := 0
		for range 1 + r.IntN(4) {
			n := 1 + r.IntN(MaxPlain)
			p := random(r, n)
			sent = append(sent, p...)
			copy(buf[end+Head:], p)
			rec, err := c.SealRecord(buf[end:], n)
			if err != nil {
				t.Fatal(err)
			}
			end += len(rec)
		}
		wire = append(wire, buf[:end]...)
		for len(wire) > 0 {
			n := min(len(wire), 1+r.IntN(80000))
			s.Feed(wire[:n])
			wire = wire[n:]
			var parts [][]byte // all valid until the next Feed
			for {
				b, err := s.Next()
				if err == ErrMore {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				parts = append(parts, b)
			}
			got = append(got, bytes.Join(parts, nil)...)
		}
	}
	if !bytes.Equal(sent, got) {
		t.Errorf("%d bytes sent, %d others came", len(sent), len(got))
	}
}

// FuzzFeed: whatever an attacker sends, in whatever pieces, nothing that was not
// sealed comes out, and both makers end or wait, never neither.
func FuzzFeed(f *testing.F) {
	f.Add([]byte{23, 3, 3, 0, 20, 1, 2, 3}, uint16(1))
	f.Add([]byte{21, 3, 3, 0, 2, 1, 0}, uint16(7))
	f.Fuzz(func(t *testing.T, junk []byte, cut uint16) {
		for _, m := range makers {
			e := lone(t, m)
			n := min(int(cut), len(junk))
			for _, part := range [][]byte{junk[:n], junk[n:]} {
				e.Feed(slices.Clone(part))
				out, err := drain(e, make([]byte, 100))
				if len(out) > 0 {
					t.Fatalf("%x came out of junk", out)
				}
				if err == io.EOF {
					t.Fatal("junk ended the stream in order")
				}
				if err != ErrMore {
					break
				}
			}
			e.Take(nil)
		}
	})
}

// lone returns a fresh receiving end. A handshake an input would be slow: Own's is
// made of fixed secrets, Std's is shaken.
func lone(t *testing.T, m Maker) Conn {
	if m == Std {
		_, s := pair(t, Std, Std, nil)
		return s
	}
	return newEngine(tls.TLS_AES_128_GCM_SHA256, false, &keyLog{client: bytes.Repeat([]byte{1}, 32), server: bytes.Repeat([]byte{2}, 32)})
}

func TestAllocs(t *testing.T) {
	for name, m := range makers {
		client, server := pair(t, m, m, nil)
		p := make([]byte, 3*MaxPlain)
		wire := make([]byte, 0, 4*MaxRecord)
		out := make([]byte, MaxPlain)
		step := func() {
			w, err := client.Seal(wire, p)
			if err != nil {
				t.Fatal(err)
			}
			server.Feed(w)
			for {
				if _, err := server.Read(out); err == ErrMore {
					return
				} else if err != nil {
					t.Fatal(err)
				}
			}
		}
		step()
		// crypto/tls allocates a small reader each time it looks for a record, the
		// fourth in vain; its scratch buffer is from a sync.Pool, which the race
		// detector empties at random.
		want := map[Maker]float64{Std: 4, Own: 0}[m]
		if n := testing.AllocsPerRun(200, step); n > want && !(raceEnabled && m == Std) {
			t.Errorf("%s: %v allocations for three records, want %v", name, n, want)
		}
	}
}

func BenchmarkRecord(b *testing.B) {
	for name, m := range makers {
		for _, size := range []int{128, MaxPlain, 16 * MaxPlain} {
			client, server := pair(b, m, m, nil)
			p := make([]byte, size)
			wire := make([]byte, 0, size+(size/MaxPlain+1)*64+64)
			out := make([]byte, size)
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(size))
				for b.Loop() {
					w, err := client.Seal(wire, p)
					if err != nil {
						b.Fatal(err)
					}
					server.Feed(w)
					for err == nil {
						_, err = server.Read(out)
					}
				}
			})
		}
	}
}
