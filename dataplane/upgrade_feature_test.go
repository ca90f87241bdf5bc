package dataplane_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/dataplane/model"
)

// TestUpgradeRules: a request for an upgrade is a GET to routes and to policy, at the source and at the
// destination, although the hop carries it as CONNECT; and so it stands in the record.
func TestUpgradeRules(t *testing.T) {
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	other := w.pod("other", "other", "other", "127.1.0.8")
	w.pod("cart1", "cart", "cart", "127.1.0.1")

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := ln.Addr().(*net.TCPAddr).Port
	seen := make(chan string, 16)
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		by, _, _ := strings.Cut(r.Header.Get("X-Forwarded-Client-Cert"), ";")
		seen <- fmt.Sprintf("%s %s%s by=%s x-rule=%s %s", r.Method, r.Host, r.RequestURI, by[strings.LastIndex(by, "/")+1:], r.Header.Get("X-Rule"), r.Header.Get("Upgrade"))
		c, rest, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: foo\r\nX-Aether-Outcome: forged\r\n\r\n")
		io.Copy(c, rest)
	})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	t.Cleanup(func() { srv.Close(); wg.Wait() })

	at := map[string]string{
		"web":   w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web)),
		"other": w.listen(other.Engine, "127.0.0.1:0", w.out.AcceptProxy(other)),
	}
	w.apply(strings.ReplaceAll(`
service shop/cart 127.0.0.2
pods shop/cart PORT ip=127.1.0.1 pod=cart-1
local shop/web cid=web
local shop/other cid=other
local shop/cart PORT cid=cart1
filter shop/nobody rbac policy=p;ns:none
filter shop/in scope=inbound target=cart rbac deny policy=p;id:spiffe://td/ns/shop/sa/other policy=q;ns:shop;path:/private
route shop/cart cart
rule match=prefix:/admin use=nobody
rule match=prefix:/edit set=x-rule:edit rset=x-answer:1
`, "PORT", fmt.Sprint(port)))
	host := fmt.Sprintf("cart.shop.aether.internal:%d", port)

	for _, tt := range []struct {
		from, path, want string // what the application saw, or the status
	}{
		{"web", "/edit/x?q=1", "GET " + host + "/edit/x?q=1 by=cart x-rule=edit foo"},
		{"web", "/", "GET " + host + "/ by=cart x-rule= foo"},
		{"web", "/admin", "403"},     // by the source
		{"web", "/private/x", "403"}, // by the destination
		{"web", "/%70rivate", "403"},
		{"other", "/", "403"},
	} {
		for len(w.journal.ch) > 0 {
			<-w.journal.ch
		}
		c, err := net.Dial("tcp", at[tt.from])
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: upgrade\r\nUpgrade: foo\r\n\r\n", tt.path, host)
		br := bufio.NewReader(c)
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatalf("%s: %v", tt.path, err)
		}
		if res.StatusCode != 101 {
			if fmt.Sprint(res.StatusCode) != tt.want {
				t.Errorf("%s from %s: %s, want %s", tt.path, tt.from, res.Status, tt.want)
			}
			continue
		}
		if got := <-seen; got != tt.want {
			t.Errorf("%s: the application saw\n%s, want\n%s", tt.path, got, tt.want)
		}
		if res.Header.Get("X-Aether-Outcome") != "" || (res.Header.Get("X-Answer") == "1") != strings.HasPrefix(tt.path, "/edit") {
			t.Errorf("%s: the answer has %v", tt.path, res.Header)
		}
		io.WriteString(c, "hello")
		c.(*net.TCPConn).CloseWrite()
		if b, err := io.ReadAll(br); err != nil || string(b) != "hello" {
			t.Errorf("%s: %q came back, %v", tt.path, b, err)
		}
		for range 2 { // the source's and the destination's
			e := <-w.journal.ch
			if e.Method.String() != "GET" || e.Status != 101 || e.BytesIn != 5 || e.BytesOut != 5 || e.Ended != "complete" {
				t.Errorf("%s: recorded as %s %d, %d in, %d out, ended by %s", tt.path, e.Method.String(), e.Status, e.BytesIn, e.BytesOut, e.Ended)
			}
			if e.Dir != model.Inbound && e.Outcome.String() != "101;-;GET;via_upstream" {
				t.Errorf("%s: the outcome is %q", tt.path, e.Outcome.String())
			}
		}
	}
	if len(seen) > 0 {
		t.Errorf("the application saw %s, too", <-seen)
	}
}
