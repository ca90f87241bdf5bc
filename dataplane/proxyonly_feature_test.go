package dataplane_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestWhatOnlyProxiesMaySet: a client's own fields of those that only a proxy may set reach no application, and an application's no
// client: in heads and trailers, in any spelling, whatever version of HTTP the two speak. Selection fields stay (contract 6.6).
func TestWhatOnlyProxiesMaySet(t *testing.T) {
	forged := []string{"x-forwarded-client-cert", "x_forwarded_client_cert", "x-forwarded-client_cert", "x-aether-outcome", "x_aether-outcome",
		"x-aether-error", "x-aether_error", "x-aether-declined", "x-envoy-auth-partial-body", "x_envoy_auth_partial_body"}
	isForged := func(h http.Header) (found []string) {
		for name, v := range h {
			if strings.Contains(strings.Join(v, ""), "forged") {
				found = append(found, name)
			}
		}
		slices.Sort(found)
		return found
	}
	for _, class := range []string{"http", "h2"} {
		t.Run(class, func(t *testing.T) {
			w := newTown(t)
			web := w.pod("web", "web", "web", "127.1.0.9")
			w.pod("cart1", "cart", "cart", "127.1.0.1")
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			got := make(chan string, 1)
			srv := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				got <- fmt.Sprintf("%d head %v trailer %v xfcc=%d ip=%s sum=%s", r.ProtoMajor, isForged(r.Header), isForged(r.Trailer), len(r.Header.Values("X-Forwarded-Client-Cert")),
					r.Header.Get("X-Aether-Subset-Version"), r.Trailer.Get("x-sum"))
				for _, f := range forged {
					rw.Header()[f] = []string{"forged"}
					rw.Header()[http.TrailerPrefix+f] = []string{"forged"}
				}
				rw.Header().Set(http.TrailerPrefix+"x-sum", "2")
				_, _ = io.WriteString(rw, "done")
				_ = http.NewResponseController(rw).Flush() // else it has a length, and no trailers over HTTP/1
			})}
			srv.Protocols.SetHTTP1(true)
			srv.Protocols.SetUnencryptedHTTP2(true)
			var wg sync.WaitGroup
			wg.Go(func() { _ = srv.Serve(ln) })
			t.Cleanup(func() { srv.Close(); wg.Wait() })
			port := ln.Addr().(*net.TCPAddr).Port
			at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
			w.apply(strings.ReplaceAll(`
service shop/cart 127.0.0.2 PORT=CLASS
pods shop/cart PORT=CLASS ip=127.1.0.1 pod=cart-1 meta=version:v1
local shop/web cid=web
local shop/cart PORT=CLASS cid=cart1
`, "PORT=CLASS", fmt.Sprintf("%d=%s", port, class)))
			c, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			lines := ""
			for _, f := range forged {
				lines += f + ": forged\r\n"
			}
			fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: cart.shop.aether.internal:%d\r\nTE: trailers\r\nX-Aether-Subset-Version: v1\r\nTrailer: x-sum\r\nTransfer-Encoding: chunked\r\n%s\r\n1\r\nx\r\n0\r\nx-sum: 1\r\n%s\r\n", port, lines, lines)
			res, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(res.Body)
			if res.StatusCode != 200 || string(b) != "done" || err != nil {
				t.Fatalf("%d %q, %v", res.StatusCode, b, err)
			}
			want := "1 head [] trailer [] xfcc=1 ip=v1 sum=1"
			if class == "h2" {
				want = "2" + want[1:]
			}
			if got := <-got; got != want {
				t.Errorf("the application got %s\nwant %s", got, want)
			}
			if h, tr := isForged(res.Header), isForged(res.Trailer); len(h)+len(tr) > 0 || res.Trailer.Get("x-sum") != "2" {
				t.Errorf("the client got head %v, trailers %v, sum %q", h, tr, res.Trailer.Get("x-sum"))
			}
		})
	}
}
