package inbound

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"aether/controlplane/compile"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls/record"
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
				x.Begin()
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

// noPlain is a record layer to which no whole record comes.
type noPlain struct{ record.Conn }

func (noPlain) Feed([]byte)              {}
func (noPlain) Read([]byte) (int, error) { return 0, record.ErrMore }

// TestFirstBytesAreBounded: a verified caller has fifteen seconds for its first bytes, whether it is silent or sends some of
// a record now and then.
func TestFirstBytesAreBounded(t *testing.T) {
	for _, every := range []time.Duration{time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			a, b := net.Pipe() // whose deadlines are the bubble's
			over := make(chan struct{})
			defer func() { a.Close(); close(over) }()
			go func() {
				for at := time.NewTicker(every); ; {
					if _, err := b.Write([]byte{23}); err != nil {
						return
					}
					select {
					case <-at.C:
					case <-over:
						return
					}
				}
			}()
			start := time.Now()
			_, _, err := peek(a, noPlain{})
			if took := time.Since(start); !errors.Is(err, os.ErrDeadlineExceeded) || took != 15*time.Second {
				t.Errorf("a byte each %v: %v after %v", every, err, took)
			}
		})
	}
}

// deaf is an application that no connect reaches.
type deaf struct {
	engine.Sockets
	until time.Time
}

func (d *deaf) Connect(ctx context.Context, _ netip.AddrPort) (*net.TCPConn, error) {
	d.until, _ = ctx.Deadline()
	return nil, context.DeadlineExceeded
}

// kept is a journal of the last entry.
type kept struct{ e journal.Entry }

func (k *kept) Ended(e *journal.Entry) { k.e = *e }

// TestConnectIsBounded: a raw-TCP port whose application does not answer a connect has five seconds (contract 6.5); then the
// caller is reset.
func TestConnectIsBounded(t *testing.T) {
	s, _ := compile.Compile(modeltest.Mesh(t, "local shop/db 5432=tcp cid=c1\n"))
	var store snapshot.Store
	store.Swap(s)
	var log kept
	in := New(Config{Store: &store, Journal: &log})
	app := &deaf{}
	e, err := engine.New(engine.Config{MaxLoops: 1, Memory: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	pod := &Pod{Context: t.Context(), Container: "c1", Sockets: app, Engine: e.AddPod("db")}
	c := in.newConn(pod, 0)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	caller, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer caller.Close()
	hop, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	in.relay(nil, c, &meshhop.Inbound{Conn: hop.(*net.TCPConn)}, nil)
	if least, most := start.Add(5*time.Second), time.Now().Add(5*time.Second); app.until.Before(least) || app.until.After(most) {
		t.Errorf("the connect has %v", app.until.Sub(start))
	}
	if log.e.Cause != "connect" || log.e.Ended != "server" {
		t.Errorf("recorded as %s, ended by the %s", log.e.Cause, log.e.Ended)
	}
	if _, err := caller.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the caller sees %v", err)
	}
	// A pod that holds as much as it may gets no further relay.
	pod.Engine.HoldBytes(4<<20 + 1)
	app.until = time.Time{}
	second, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if hop, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	in.relay(nil, c, &meshhop.Inbound{Conn: hop.(*net.TCPConn)}, nil)
	if !app.until.IsZero() || log.e.Cause != causeOverload || log.e.Ended != "proxy" {
		t.Errorf("recorded as %s, ended by the %s; connect until %v", log.e.Cause, log.e.Ended, app.until)
	}
	if _, err := second.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the caller of a pod that holds too much sees %v", err)
	}
}
