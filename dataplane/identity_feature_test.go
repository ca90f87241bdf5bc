package dataplane_test

import (
	"bufio"
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aether/meshhop"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

// rotate gives the pod of that container another certificate or bundle, as Node does.
func (w *town) rotate(container string, s *mtls.SVID) {
	w.mu.Lock()
	w.svids[container] = s
	w.mu.Unlock()
	w.out.Rotated(container)
	w.in.Rotated(container)
}

// trusts is s with the bundle of those authorities.
func trusts(t *testing.T, s *mtls.SVID, cas ...*devca.CA) *mtls.SVID {
	v := *s
	v.Roots = x509.NewCertPool()
	for _, ca := range cas {
		for _, c := range issue(t, ca, "web", time.Hour).Authorities {
			v.Roots.AddCert(c)
		}
	}
	return &v
}

func issue(t *testing.T, ca *devca.CA, name string, life time.Duration) *mtls.SVID {
	t.Helper()
	id, err := spiffeid.Parse("spiffe://td/ns/shop/sa/" + name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ca.Issue(id, life)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// parrot answers a GET with a first byte and goes on for ever; grants an Upgrade, and repeats what
// is said then; and repeats all else.
func (w *town) parrot() (port int) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				r := bufio.NewReader(c)
				if b, _ := r.Peek(4); string(b) != "GET " {
					_, _ = io.Copy(c, r)
					return
				}
				req, err := http.ReadRequest(r)
				switch {
				case err != nil:
				case req.URL.Path == "/quick":
					fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
				case req.Header.Get("Upgrade") != "":
					fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: %s\r\n\r\n", req.Header.Get("Upgrade"))
					_, _ = io.Copy(c, r)
				default:
					fmt.Fprint(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
					for t := time.NewTicker(100 * time.Millisecond); ; <-t.C {
						if _, err := fmt.Fprint(c, "1\r\nx\r\n"); err != nil {
							return
						}
					}
				}
			})
		}
	})
	w.t.Cleanup(func() { ln.Close(); wg.Wait() })
	return ln.Addr().(*net.TCPAddr).Port
}

// TestSessionsEndWithTheirIdentity: whatever carries it, what was opened with a certificate ends when that, or what it was
// trusted by, ends, at whichever side; and goes on where an honest rotation gives the pod another.
func TestSessionsEndWithTheirIdentity(t *testing.T) {
	const short = 4 * time.Second
	carriers := []string{"http", "upgrade", "raw"}
	for name, tt := range map[string]struct {
		web, cart time.Duration // of the certificates at the beginning; 0: an hour
		news      func(t *testing.T, w *town, old, fresh *devca.CA)
		stays     bool
	}{
		"the caller's certificate expires":      {web: short},
		"the destination's certificate expires": {cart: short},
		"the caller trusts another authority":   {news: func(t *testing.T, w *town, old, fresh *devca.CA) { w.rotate("web", issue(t, fresh, "web", time.Hour)) }},
		"the destination trusts another authority": {news: func(t *testing.T, w *town, old, fresh *devca.CA) {
			w.rotate("cart", issue(t, fresh, "cart", time.Hour))
		}},
		"an authority is taken out of a bundle": {news: func(t *testing.T, w *town, old, fresh *devca.CA) {
			w.rotate("cart", trusts(t, w.svid("cart"), old, fresh))
			w.rotate("cart", trusts(t, w.svid("cart"), fresh))
		}},
		"both certificates are renewed": {stays: true, news: func(t *testing.T, w *town, old, fresh *devca.CA) {
			w.rotate("web", issue(t, old, "web", time.Hour))
			w.rotate("cart", issue(t, old, "cart", time.Hour))
		}},
		"an authority comes, and both are renewed by it": {stays: true, news: func(t *testing.T, w *town, old, fresh *devca.CA) {
			w.rotate("web", trusts(t, w.svid("web"), old, fresh))
			w.rotate("cart", trusts(t, w.svid("cart"), old, fresh))
			w.rotate("web", trusts(t, issue(t, fresh, "web", time.Hour), old, fresh))
			w.rotate("cart", trusts(t, issue(t, fresh, "cart", time.Hour), old, fresh))
		}},
	} {
		for _, near := range []bool{false, true} {
			for _, carrier := range carriers {
				if near && carrier == "raw" {
					continue // over the hop, whatever is said
				}
				t.Run(fmt.Sprintf("%s, %s, in process %v", name, carrier, near), func(t *testing.T) {
					t.Parallel()
					w := newTown(t)
					w.near = near
					fresh, err := devca.Open(t.TempDir(), "td", nil)
					if err != nil {
						t.Fatal(err)
					}
					web := w.pod("web", "web", "web", "127.1.0.9")
					w.pod("cart", "cart", "cart", "127.1.0.1")
					if tt.web != 0 {
						w.rotate("web", issue(t, w.ca, "web", tt.web))
					}
					if tt.cart != 0 {
						w.rotate("cart", issue(t, w.ca, "cart", tt.cart))
					}
					port := w.parrot()
					class := "http"
					if carrier == "raw" {
						class = "tcp"
					}
					w.apply(fmt.Sprintf("service shop/cart 127.0.0.2\npods shop/cart %[1]d=%[2]s ip=127.1.0.1 id=spiffe://td/ns/shop/sa/cart\nlocal shop/web cid=web\nlocal shop/cart %[1]d=%[2]s cid=cart\n", port, class))
					at := w.listen(web.Engine, fmt.Sprintf("127.0.0.2:%d", port), w.out.AcceptCaptured(web))
					c, err := net.Dial("tcp", at)
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(30 * time.Second))
					r := bufio.NewReader(c)
					echo := func() error {
						if carrier == "http" {
							_, err := r.ReadByte()
							return err
						}
						if _, err := fmt.Fprint(c, "hello"); err != nil {
							return err
						}
						_, err := io.ReadFull(r, make([]byte, 5))
						return err
					}
					switch carrier {
					case "http":
						fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: cart.shop:%d\r\n\r\n", port)
					case "upgrade":
						fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: cart.shop:%d\r\nConnection: upgrade\r\nUpgrade: parrot\r\n\r\n", port)
					}
					if carrier != "raw" {
						for line := "x"; line != "\r\n"; {
							if line, err = r.ReadString('\n'); err != nil {
								t.Fatal(err)
							}
							if strings.HasPrefix(line, "HTTP/1.1 ") && !strings.HasPrefix(line, "HTTP/1.1 200") && !strings.HasPrefix(line, "HTTP/1.1 101") {
								t.Fatal(line)
							}
						}
					}
					if err := echo(); err != nil {
						t.Fatal(err)
					}
					if tt.news != nil {
						tt.news(t, w, w.ca, fresh)
					}
					if tt.stays {
						for range 50 {
							if err := echo(); err != nil {
								t.Fatalf("it ended: %v", err)
							}
						}
						return
					}
					for err == nil {
						err = echo()
					}
					if n, ok := err.(net.Error); ok && n.Timeout() {
						t.Error("it goes on")
					}
				})
			}
		}
	}
}

// TestPeerThatStays: a peer that does not end its session is ended by the other side: whoever calls and stays on, when his
// certificate has expired or is trusted no more.
func TestPeerThatStays(t *testing.T) {
	for name, tt := range map[string]struct {
		life time.Duration
		news func(t *testing.T, w *town, fresh *devca.CA)
	}{
		"his certificate expires": {life: 4 * time.Second},
		"the destination trusts another authority": {time.Hour, func(t *testing.T, w *town, fresh *devca.CA) {
			w.rotate("cart", issue(t, fresh, "cart", time.Hour))
		}},
	} {
		for _, proto := range []meshhop.Proto{meshhop.H2, meshhop.Raw} {
			t.Run(fmt.Sprint(name, ", ", proto), func(t *testing.T) {
				t.Parallel()
				w := newTown(t)
				fresh, err := devca.Open(t.TempDir(), "td", nil)
				if err != nil {
					t.Fatal(err)
				}
				w.pod("web", "web", "web", "127.1.0.9")
				w.pod("cart", "cart", "cart", "127.1.0.1")
				w.rotate("web", issue(t, w.ca, "web", tt.life))
				port, class, said := w.parrot(), "http", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
				if proto == meshhop.Raw {
					class, said = "tcp", "hello"
				}
				w.apply(fmt.Sprintf("local shop/web cid=web\nlocal shop/cart %d=%s cid=cart\n", port, class))
				d := meshhop.Dialer{SVID: w.svid, Sockets: func(ctx context.Context, _ string, a netip.AddrPort) (*net.TCPConn, error) {
					return here{}.Connect(ctx, a)
				}}
				s, err := d.Dial(w.ctx, meshhop.Key{
					Pod: "web", Source: w.svid("web").ID, Endpoint: netip.MustParseAddrPort(w.hops[netip.MustParseAddr("127.1.0.1")]),
					SNI: fmt.Sprint(port), Proto: proto, Pin: w.svid("cart").ID,
				})
				if err != nil {
					t.Fatal(err)
				}
				defer s.Conn.Close()
				b, err := s.Record().Seal(nil, []byte(said))
				if err != nil {
					t.Fatal(err)
				}
				if _, err := s.Conn.Write(b); err != nil {
					t.Fatal(err)
				}
				_ = s.Conn.SetReadDeadline(time.Now().Add(30 * time.Second))
				if _, err := s.Conn.Read(make([]byte, 16<<10)); err != nil { // SETTINGS, or what it repeats
					t.Fatal(err)
				}
				if tt.news != nil {
					tt.news(t, w, fresh)
				}
				for err == nil {
					_, err = s.Conn.Read(make([]byte, 16<<10))
				}
				if n, ok := err.(net.Error); ok && n.Timeout() {
					t.Error("it goes on")
				}
				if tt.news == nil && time.Now().Before(s.NotAfter.Add(-2*time.Second)) && proto == meshhop.Raw {
					t.Error("it ended before its time")
				}
			})
		}
	}
}

// TestRotationLosesNothing: under traffic, certificates and bundles are renewed as they should be (A, A and B, B), and
// every request is answered.
func TestRotationLosesNothing(t *testing.T) {
	for _, near := range []bool{false, true} {
		t.Run(fmt.Sprint("in process ", near), func(t *testing.T) {
			w := newTown(t)
			w.near = near
			next, err := devca.Open(t.TempDir(), "td", nil)
			if err != nil {
				t.Fatal(err)
			}
			web := w.pod("web", "web", "web", "127.1.0.9")
			w.pod("cart", "cart", "cart", "127.1.0.1")
			port := w.app()
			w.apply(fmt.Sprintf("service shop/cart 127.0.0.2\npods shop/cart %[1]d ip=127.1.0.1 id=spiffe://td/ns/shop/sa/cart\nlocal shop/web cid=web\nlocal shop/cart %[1]d cid=cart\n", port))
			proxy := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			var done, lost atomic.Int64
			for range 4 {
				wg.Go(func() {
					for ctx.Err() == nil {
						code, text, _, err := ask(t.Context(), proxy, "POST", fmt.Sprintf("cart.shop.aether.internal:%d", port), "/", nil)
						if err != nil || code != 200 {
							lost.Add(1)
							t.Errorf("%d %s %v", code, text, err)
						}
						done.Add(1)
					}
				})
			}
			more := func() { // each stage sees some traffic
				for until := done.Load() + 40; done.Load() < until && lost.Load() == 0; {
					<-time.After(time.Millisecond)
				}
			}
			old := w.ca
			more()
			for _, stage := range []func(pod string) *mtls.SVID{
				func(pod string) *mtls.SVID { return issue(t, old, pod, time.Hour) },
				func(pod string) *mtls.SVID { return trusts(t, w.svid(pod), old, next) },
				func(pod string) *mtls.SVID { return trusts(t, issue(t, next, pod, time.Hour), old, next) },
			} {
				for _, pod := range []string{"web", "cart"} {
					w.rotate(pod, stage(pod))
					more()
				}
			}
			// Only now, that nobody shows a certificate of it any more, the old authority goes. Sessions that were opened
			// with one end, and what is under way on them is done first.
			for _, pod := range []string{"web", "cart"} {
				w.rotate(pod, trusts(t, w.svid(pod), next))
				more()
			}
			cancel()
			wg.Wait()
			if lost.Load() > 0 || done.Load() < 300 {
				t.Errorf("%d of %d requests were lost", lost.Load(), done.Load())
			}
		})
	}
}
