package dataplane_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/model"
)

// TestRetryInNewWorld: what is sent again goes to who is there by then. An endpoint that has
// left the registry gets nothing more, and no session is made to it.
func TestRetryInNewWorld(t *testing.T) {
	for _, tt := range []struct {
		name, pin string
		gone      int // of two; the other comes
		code      int
		by        string
	}{
		{"another has come", "", 1, 200, "cart2"},
		{"a pin knows no other", "127.1.0.1", 1, 503, ""},
		{"nobody is left", "", 2, 503, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel() // an attempt waits five seconds for its answer
			p := newPool(t, 2)
			p.mesh("http", p.port, func(i int, l string) string {
				if i == 2 {
					return ""
				}
				return l
			})
			type answer struct {
				code int
				text string
				err  error
			}
			done := make(chan answer, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			var fields []string
			if tt.pin != "" {
				fields = []string{"X-Aether-Ip", tt.pin}
			}
			go func() {
				code, text, _, err := ask(ctx, p.at, "GET", fmt.Sprintf("cart.shop.aether.internal:%d", p.port), "/hang", nil, fields...)
				done <- answer{code, text, err}
			}()
			if by := <-p.inside; by != "cart1" {
				t.Fatalf("it is at %s", by)
			}
			p.mesh("http", p.port, func(i int, l string) string {
				if i <= tt.gone {
					return ""
				}
				return l
			})
			if tt.by != "" {
				if by := <-p.inside; by != tt.by {
					t.Errorf("sent again to %s, want %s", by, tt.by)
				}
				p.release()
			}
			a := <-done
			if a.err != nil || a.code != tt.code || tt.by != "" && a.text != tt.by {
				t.Errorf("%+v, want %d %s", a, tt.code, tt.by)
			}
			if tt.by == "" {
				p.entry("no-endpoint")
			}
			if len(p.inside) > 0 {
				t.Errorf("sent again to %s", <-p.inside)
			}
			if s := p.status(1); s.Sessions != 0 || s.Open != 0 {
				t.Errorf("cart1 is gone, and has %+v", s)
			}
		})
	}
}

// TestTimeoutsAreFailures: whoever answers too late for the rule has not answered, whichever of its limits is
// met.
func TestTimeoutsAreFailures(t *testing.T) {
	for _, limit := range []string{"timeout", "attempt"} {
		t.Run(limit, func(t *testing.T) {
			p := newPool(t, 2)
			text := "service shop/cart 127.0.0.2\nlocal shop/web cid=web\n"
			for i := 1; i <= 2; i++ {
				text += fmt.Sprintf("pods shop/cart %d=http ip=127.1.0.%d id=spiffe://td/ns/shop/sa/cart%d\nlocal shop/cart %d=http cid=cart%d\n", p.port, i, i, p.port, i)
			}
			p.apply(text + "route shop/cart cart\nrule match=prefix:/hang " + limit + "=60ms\n")
			for range 3 {
				if code, _ := p.ask("/hang", "127.1.0.1"); code != 504 {
					t.Fatalf("status %d, want 504", code)
				}
			}
			if s := p.status(1); s.Ejections != 1 || s.Open != 0 {
				t.Errorf("after three: %+v, want to be ejected", s)
			}
			p.release()
		})
	}
}

// TestRetriesOfOnePod: the places of one pod's retries are its own.
func TestRetriesOfOnePod(t *testing.T) {
	const n = 16
	again := make(chan struct{}, 2*n)
	app := newWitness(t, func(id string, k int) string {
		switch {
		case k == 0:
			return "503"
		case id == "other":
			return "200"
		}
		again <- struct{}{}
		return "hang"
	})
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	other := w.pod("other", "other", "other", "127.1.0.8")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	elsewhere := w.listen(other.Engine, "127.0.0.1:0", w.out.AcceptProxy(other))
	w.apply(fmt.Sprintf("service shop/cart 127.0.0.2\npods shop/cart %[1]d ip=127.1.0.1\nlocal shop/web cid=web\nlocal shop/other cid=other\nlocal shop/cart %[1]d cid=cart1\n", app.port))
	host := fmt.Sprintf("cart.shop.aether.internal:%d", app.port)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range n {
		go ask(ctx, at, "POST", host, fmt.Sprint("/", i), strings.NewReader("x"))
	}
	for range n {
		<-again
	}
	if code, _, _, err := ask(ctx, elsewhere, "GET", host, "/other", nil); err != nil || code != 200 {
		t.Errorf("another pod's request: %d, %v", code, err)
	}
	if code, _, _, err := ask(ctx, at, "GET", host, "/17", nil); err != nil || code != 503 {
		t.Errorf("one more of the same pod's: %d, %v", code, err)
	}
	if o := w.out.RetriesOverflow.Value(); o != 1 {
		t.Errorf("%d were not sent again, want 1", o)
	}
}

// TestGRPCRefusalsAreRecorded: a refusal leaves as 200 in the clothes of gRPC, and is recorded as
// what it is, at both ends.
func TestGRPCRefusalsAreRecorded(t *testing.T) {
	var down atomic.Bool
	down.Store(true)
	w := newTown(t)
	w.sockets = func(container string) engine.Sockets {
		if container == "cart" {
			return lame{down: &down}
		}
		return here{}
	}
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart", "cart", "cart", "127.1.0.1")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(`
service shop/cart 127.0.0.2
pods shop/cart 8080 ip=127.1.0.1
service shop/sick 127.0.0.3
pods shop/sick 8080 ip=127.1.0.2 health=unhealthy
local shop/web cid=web
local shop/cart 8080 cid=cart
`)
	for _, tt := range []struct {
		host   string
		dir    model.Direction
		status int
		cause  string
	}{
		{"sick.shop.aether.internal:8080", model.Proxy, 503, ""},
		{"cart.shop.aether.internal:8081", model.Proxy, 421, ""},
		{"cart.shop.aether.internal:8080", model.Inbound, 503, "connect"},
	} {
		code, _, h, err := ask(t.Context(), at, "POST", tt.host, "/x", strings.NewReader("a"), "Content-Type", "application/grpc")
		if err != nil || code != http.StatusOK || h.Get("Grpc-Status") == "" {
			t.Fatalf("%s: %d %v, %v", tt.host, code, h, err)
		}
		for late, found := time.After(20*time.Second), false; !found; {
			select {
			case e := <-w.journal.ch:
				if found = e.Dir == tt.dir; found && (e.Status != tt.status || e.Cause != tt.cause && tt.cause != "" || !e.Failed()) {
					t.Errorf("%s: recorded as %d, cause %q, flags %s: %s", tt.host, e.Status, e.Cause, e.Flags, e.String())
				}
			case <-late:
				t.Fatalf("%s: nothing is recorded", tt.host)
			}
		}
	}
}
