package netns

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"
)

// Public bug reports about TLS and the detection of protocols that need real sockets, by their numbers in docs/cases.md.
// 106 is with the routes.

// TestCase93 (envoy 40730): a first flight larger than any buffer for inspection arrives whole, whatever it looks like.
func TestCase93(t *testing.T) {
	t.Parallel()
	noise := make([]byte, 20<<10)
	rnd := rand.NewChaCha8([32]byte{93})
	rnd.Read(noise)
	noise[0] = 0xff
	for _, tt := range []struct {
		name  string
		first []byte
	}{
		{"noise", noise},
		{"text without an end", bytes.Repeat([]byte("A"), 20<<10)},
		{"a hello that never ends", append([]byte{22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xfc, 3, 3}, noise[:16<<10]...)},
		{"a head that never ends", append([]byte("GET / HTTP/1.1\r\nHost: foreign.example\r\nX: "), bytes.Repeat([]byte("y"), 100<<10)...)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := outside(t, within(t, patience), w.Pod("web"), string(tt.first))
			expect(t, f.server, string(tt.first))
			say(t, f.server, "whole")
			expect(t, f.client, "whole")
		})
	}
}

// onTheWay rewrites what a TLS client writes first, its hello.
type onTheWay struct {
	*net.TCPConn
	hello func(*net.TCPConn, []byte) error
	said  bool
}

func (c *onTheWay) Write(b []byte) (int, error) {
	if c.said {
		return c.TCPConn.Write(b)
	}
	c.said = true
	return len(b), c.hello(c.TCPConn, b)
}

// TestCase94 (envoy 33850), TestCase95 (caddy-l4 346), TestCase96 (tlsfuzzer 160): hellos in several segments and records
// are hellos, and pass untouched: outside the mesh, on an address of the mesh, and as the bytes of a raw-TCP port.
func TestCase94(t *testing.T) {
	helloCase(t, func(t *testing.T, ctx context.Context, c *net.TCPConn, hello []byte) error {
		at := bytes.Index(hello, []byte(hiddenName))
		if len(hello) < 1500 || at < 0 {
			t.Errorf("the hello is no post-quantum one with a name: %d bytes, name at %d", len(hello), at)
			at = 10
		}
		cut := at + len(hiddenName)/2
		if _, err := c.Write(hello[:cut]); err != nil {
			return err
		}
		acked(t, ctx, c)
		_, err := c.Write(hello[cut:])
		return err
	})
}

func TestCase95(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 500} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			helloCase(t, func(t *testing.T, _ context.Context, c *net.TCPConn, hello []byte) error {
				_, err := c.Write(records(hello, n))
				return err
			})
		})
	}
}

func TestCase96(t *testing.T) {
	helloCase(t, func(t *testing.T, ctx context.Context, c *net.TCPConn, hello []byte) error {
		all := records(hello, 1)
		for _, part := range [][]byte{all[:3], all[3:6], all[6:7], all[7:]} { // record by record at first
			if _, err := c.Write(part); err != nil {
				return err
			}
			acked(t, ctx, c)
		}
		return nil
	})
}

// records spreads a hello over records of n bytes each.
func records(hello []byte, n int) (all []byte) {
	for body := hello[5:]; len(body) > 0; body = body[min(n, len(body)):] {
		all = append(all, record(22, body[:min(n, len(body))])...)
	}
	return all
}

const hiddenName = "hidden.shop.example"

// helloCase has a TLS conversation whose hello is written so, by every way that TLS takes through the proxy.
func helloCase(t *testing.T, write func(*testing.T, context.Context, *net.TCPConn, []byte) error) {
	t.Helper()
	t.Parallel()
	for _, to := range tlsWays(t) {
		t.Run(to.name, func(t *testing.T) {
			ctx := within(t, patience)
			talkTLS(t, ctx, to.serve, &onTheWay{TCPConn: dial(t, ctx, w.Pod("web"), to.addr), hello: func(c *net.TCPConn, b []byte) error {
				return write(t, ctx, c, b)
			}}, hiddenName)
		})
	}
}

var tlsPort sync.Mutex

// tlsWay is a place where an application does its own TLS.
type tlsWay struct {
	name, addr string
	serve      func(*testing.T, context.Context) *net.TCPConn // the application's end of the next connection
}

// tlsWays are outside the mesh, an HTTP port's address of the mesh (whoever has it), and a declared raw-TCP port. A test's own.
func tlsWays(t *testing.T) []tlsWay {
	t.Helper()
	outside := listen(t, t.Context(), &w.out.Space, netip.AddrPortFrom(w.out.IP4, 0).String())
	tlsPort.Lock() // the addresses of the mesh are one test's at a time
	t.Cleanup(tlsPort.Unlock)
	atVIP := listen(t, t.Context(), &w.out.Space, vip(appVIP, portNobody))
	from := func(l net.Listener) func(*testing.T, context.Context) *net.TCPConn {
		return func(t *testing.T, ctx context.Context) *net.TCPConn { return acceptOne(t, ctx, l) }
	}
	return []tlsWay{
		{"outside", outside.Addr().String(), from(outside)},
		{"the address of an HTTP port", vip(appVIP, portNobody), from(atVIP)},
		{"a raw port", vip(appVIP, portQueue+4), func(t *testing.T, ctx context.Context) *net.TCPConn { return queues[4].accept(t, ctx) }},
	}
}

// talkTLS handshakes by c with the application, whose end accept gives, and says something both ways. The client takes no
// other certificate than the application's.
func talkTLS(t *testing.T, ctx context.Context, accept func(*testing.T, context.Context) *net.TCPConn, c net.Conn, name string) {
	t.Helper()
	svid, err := w.SVID("elsewhere", "server")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := svid.TLS()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	client := tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true, NextProtos: []string{"h2", "http/1.1"}})
	shaken := make(chan error, 1)
	go func() { shaken <- client.HandshakeContext(ctx) }()
	server := tls.Server(accept(t, ctx), &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"},
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			names = append(names, h.ServerName)
			return nil, nil
		}})
	if err := server.HandshakeContext(ctx); err != nil {
		t.Fatalf("the application's handshake: %v", err)
	}
	if err := recv(t, ctx, shaken, "the client's handshake"); err != nil {
		t.Fatalf("the client's handshake: %v", err)
	}
	s := client.ConnectionState()
	if !s.PeerCertificates[0].Equal(cert.Leaf) || s.NegotiatedProtocol != "h2" || len(names) != 1 || names[0] != name {
		t.Errorf("the client got another certificate or ALPN %q, the application saw the names %q, want %q", s.NegotiatedProtocol, names, name)
	}
	say(t, client, "question")
	expect(t, server, "question")
	say(t, server, "answer")
	expect(t, client, "answer")
}

// TestCase97 (linkerd2 6449): no connect of many waits for the client of a server that speaks first.
func TestCase97(t *testing.T) {
	outside := bannerServer(t, t.Context(), w.out.IP4)
	for _, tt := range []struct{ name, addr, banner string }{
		{"outside", outside, "220 ready\r\n"},
		{"a declared port", vip(appVIP, portBanner), "banner\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for range 10 {
				c := dial(t, within(t, 700*time.Millisecond), w.Pod("web"), tt.addr)
				expect(t, c, tt.banner)
				c.Close()
			}
		})
	}
}

// TestCase99 (linkerd2 7280): SMTP to a relay outside: the greeting at once, and STARTTLS later in the connection.
func TestCase99(t *testing.T) {
	t.Parallel()
	l := listen(t, t.Context(), &w.out.Space, netip.AddrPortFrom(w.out.IP4, 587).String())
	c := dial(t, within(t, 700*time.Millisecond), w.Pod("web"), l.Addr().String())
	ctx := within(t, patience)
	s := acceptOne(t, ctx, l)
	say(t, s, "220 relay.example ESMTP\r\n")
	expect(t, c, "220 relay.example ESMTP\r\n")
	deadline(ctx, c)
	for _, turn := range [][2]string{
		{"EHLO web\r\n", "250-relay.example\r\n250 STARTTLS\r\n"},
		{"STARTTLS\r\n", "220 go ahead\r\n"},
	} {
		say(t, c, turn[0])
		expect(t, s, turn[0])
		say(t, s, turn[1])
		expect(t, c, turn[1])
	}
	talkTLS(t, ctx, func(*testing.T, context.Context) *net.TCPConn { return s }, c, "relay.example")
}

// TestCase100 (linkerd2-proxy): a first segment of a few bytes is no protocol yet.
func TestCase100(t *testing.T) {
	t.Parallel()
	get := "GET / HTTP/1.1\r\nHost: mp-httponly\r\n\r\n"
	only, l := legNamed("mp-httponly")
	for _, tt := range []struct{ name, all, want string }{
		{"HTTP/1.1", get, "HTTP/1.1 200 OK"},
		{"h2c", h2preface, "SETTINGS"},
	} {
		for _, cut := range []int{1, 2, 4, 5, 8, 14, 15, 20} {
			t.Run(tt.name+" "+tt.all[:cut], func(t *testing.T) {
				t.Parallel()
				ctx := within(t, patience)
				// The port is HTTP by declaration; outside, the name decides.
				for _, to := range []string{vip(only, l.http[0]), netip.AddrPortFrom(w.out.IP4, 8080).String()} {
					if tt.want == "SETTINGS" && to != vip(only, l.http[0]) {
						continue // its name would come in a later frame
					}
					c := dial(t, ctx, w.Pod("web"), to)
					say(t, c, tt.all[:cut])
					acked(t, ctx, c)
					say(t, c, tt.all[cut:])
					if got, err := firstLine(bufio.NewReader(c)); got != tt.want {
						t.Errorf("to %s: got %q (%v), want %q", to, got, err, tt.want)
					}
					c.Close()
				}
			})
		}
	}
}

// TestCase103 (istio 33401), 107 (netty-tcnative 400), 108 (zapret2 259) and 110 (tlswg 319): hellos that name nothing, or not as
// they should, decide nothing: the bytes go where they were sent, untouched, and the connection lives.
func TestCase103(t *testing.T) {
	strangeHello(t, []extension{sni("10.0.0.1")}, nil)
}

func TestCase107(t *testing.T) {
	strangeHello(t, []extension{sni("mp-mixed.shop.svc.cluster.local.")})
}

func TestCase108(t *testing.T) {
	list, name := sni("mp-mixed.shop.aether.internal"), sni("mp-mixed.shop.aether.internal")
	binary.BigEndian.PutUint16(list.data, 0xffff) // longer than its extension
	binary.BigEndian.PutUint16(name.data[3:], 0xffff)
	strangeHello(t, []extension{list}, []extension{name}, []extension{{0, nil}, sni("mp-mixed")})
}

func TestCase110(t *testing.T) {
	strangeHello(t, []extension{{0x0a0a, nil}, sni("public.example"), {0xfe0d, bytes.Repeat([]byte{7, 0xfe}, 120)}, {0x2a2a, []byte{0}}})
}

func strangeHello(t *testing.T, hellos ...[]extension) {
	t.Helper()
	t.Parallel()
	for _, to := range tlsWays(t) {
		for _, extensions := range hellos {
			ctx := within(t, patience)
			hello := string(clientHello(extensions...))
			c := dial(t, ctx, w.Pod("web"), to.addr)
			say(t, c, hello)
			s := to.serve(t, ctx)
			expect(t, s, hello)
			say(t, s, "alert")
			expect(t, c, "alert")
			c.Close()
			expectEnd(t, s)
		}
	}
}

// TestCase105 (istio 29538): an application's own TLS with ALPN h2 on a port of the mesh is the application's.
func TestCase105(t *testing.T) {
	t.Parallel()
	for _, to := range tlsWays(t) {
		t.Run(to.name, func(t *testing.T) {
			ctx := within(t, patience)
			talkTLS(t, ctx, to.serve, dial(t, ctx, w.Pod("web"), to.addr), "app.shop.aether.internal")
		})
	}
	// Nor does it come to the mesh's own port for anything: no certificate of the mesh, no connection.
	ctx := within(t, patience)
	c := tls.Client(dial(t, ctx, w.out, netip.AddrPortFrom(w.Pod("app").IP4, 18008).String()), &tls.Config{ServerName: "8080", InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	err := c.HandshakeContext(ctx)
	if err == nil { // TLS 1.3 tells it with the first read
		_, err = c.Read(make([]byte, 1))
	}
	if err == nil || err == io.EOF {
		t.Errorf("a peer without a certificate: %v, want a refusal", err)
	}
	// Plain HTTP on it is none either.
	if _, err := send(ctx, transport(t, false, w.out, netip.AddrPortFrom(w.Pod("app").IP4, 18008).String()), http.MethodGet, "app", "/", nil); err == nil {
		t.Error("cleartext on the mesh's port was answered")
	}
}
