package inbound

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/controlplane/compile"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

// answerOf is a downstream stream that keeps what is answered.
type answerOf struct {
	status int
	fields []string
}

func (s *answerOf) WriteHead(h *httpmsg.Head, _ bool) {
	s.status = h.Status
	for _, f := range h.Fields {
		s.fields = append(s.fields, string(f.Name)+"="+string(f.Value))
	}
}
func (*answerOf) WriteData(p []byte, _ bool) int { return len(p) }
func (*answerOf) WriteTrailers([]httpmsg.Field)  {}
func (*answerOf) Resume()                        {}
func (*answerOf) Abort(exchange.Code)            {}

// unrecorded is an Inbound without an end of a request.
type unrecorded struct{ *Inbound }

func (unrecorded) Done(*exchange.Exchange) {}

// noSockets has none to give, for want of descriptors.
type noSockets struct{ engine.Sockets }

func (noSockets) Get(bool) (int, bool) { return -1, false }
func (noSockets) Request(_ bool, on func(int, error)) {
	on(-1, fmt.Errorf("socket: make a socket: %w", unix.EMFILE))
}

// TestShortDestination: short of memory, or of descriptors, the destination answers what the source
// may try elsewhere, whatever the method (contract 5.7), and whether it lives and is ready as ever (6.4, 6.6).
func TestShortDestination(t *testing.T) {
	m := modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart 8080
local shop/cart 8080 cid=c1
`)
	s, _ := compile.Compile(m)
	var store snapshot.Store
	store.Swap(s)
	for _, tt := range []struct {
		name, request string
		used          uint64
		status        int
		outcome       string
		cause         string
	}{
		{"memory", "POST cart/", 96, 503, "0;-;POST;overload", causeOverload},
		{"memory, alive", "GET cart/-/-/live", 99, 200, "", ""},
		{"memory, ready", "GET cart/-/-/ready", 99, 200, "200;-;GET;ready", ""},
		{"memory, not ready", "GET cart/-/-/ready", 99, 503, "503;-;GET;ready", ""},
		{"alive and not ready", "GET cart/-/-/live", 10, 200, "200;-;GET;live", ""},
		{"gone", "POST cart/", 10, 503, "0;UF;POST;upstream_connection_failure", causeGone},
		{"descriptors", "POST cart/", 10, 503, "0;UF;POST;upstream_connection_failure", "descriptors"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e, err := engine.New(engine.Config{MaxLoops: 1, Memory: 100, Used: func() uint64 { return tt.used }})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			var wg sync.WaitGroup
			defer func() { cancel(); wg.Wait() }()
			wg.Go(func() { e.Run(ctx) })
			l, pod := e.Loops()[0], e.AddPod("cart")
			onLoop := func(f func()) {
				done := make(chan struct{})
				if err := l.Post(func() { defer close(done); f() }); err != nil {
					t.Fatal(err)
				}
				<-done
			}
			for shed := tt.used < 95; !shed; {
				if ctx.Err() != nil {
					t.Fatal("the level never comes into force")
				}
				onLoop(func() { shed = pod.Sheds(l) })
			}
			container := "c1"
			if tt.name == "gone" {
				container = "c9" // removed, and its connections are not cut yet
			}
			f, err := model.ParseFlow("shop/cart@" + container + " < 8080 http1")
			if err != nil {
				t.Fatal(err)
			}
			r, err := model.ParseRequest(tt.request)
			if err != nil {
				t.Fatal(err)
			}
			ready := func(container string) bool { return container == "c1" && !strings.Contains(tt.name, "not ready") }
			in := New(Config{Store: &store, Ready: ready})
			pool := exchange.Pool{Service: unrecorded{in}}
			down := &answerOf{}
			c := &conn{in: in, pod: &Pod{Engine: pod, Container: container, Sockets: noSockets{}}, flow: f}
			c.info = engine.ConnInfo{User: c, Loop: l, Pod: pod}
			var x *exchange.Exchange
			onLoop(func() {
				x = pool.Begin(down, &r, true, &c.info, 0)
				x.Ask()
			})
			onLoop(func() { // what was posted meanwhile has run
				if got := strings.Join(down.fields, " "); down.status != tt.status || !strings.Contains(got, "x-aether-outcome="+tt.outcome) {
					t.Errorf("%d %s, want %d and %s", down.status, got, tt.status, tt.outcome)
				}
				if got := x.User.(*reqState).cause; got != tt.cause {
					t.Errorf("cause %q, want %q", got, tt.cause)
				}
			})
		})
	}
}
