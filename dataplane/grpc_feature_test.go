package dataplane_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"aether/dataplane/engine"
	"aether/dataplane/inbound"
	"aether/dataplane/model"
	"aether/dataplane/outbound"
	"aether/mtls/devca"
)

// caller is a gRPC application of grpc-go's. Its messages are those of the health
// service, which carry a string.
//
//	Say     answers one message with itself
//	Wait    says that it has begun, then answers nothing until its call is cancelled
//	Talk    answers each message as it comes; "end" ends the stream, "fail" with NotFound
//	Flood   answers with as many messages of 64 KiB as the request is long
type caller struct {
	port   int
	began  chan context.Context // calls of Wait
	ended  chan error           // why they ended
	conns  atomic.Int64         // accepted
	now    atomic.Int64         // calls of Wait under way
	most   atomic.Int64
	health *health.Server
}

// largest is a message's size that both ends are told to take, with some room.
const largest = 5 << 20

func (a *caller) say(ctx context.Context, m *healthpb.HealthCheckRequest) (any, error) { return m, nil }

func (a *caller) wait(ctx context.Context, _ *healthpb.HealthCheckRequest) (any, error) {
	n := a.now.Add(1)
	for was := a.most.Load(); n > was && !a.most.CompareAndSwap(was, n); was = a.most.Load() {
	}
	defer a.now.Add(-1)
	a.began <- ctx
	<-ctx.Done()
	a.ended <- ctx.Err()
	return nil, ctx.Err()
}

func (a *caller) talk(s grpc.ServerStream) error {
	for {
		var m healthpb.HealthCheckRequest
		switch err := s.RecvMsg(&m); {
		case errors.Is(err, io.EOF), m.Service == "end":
			return nil
		case err != nil:
			return err
		case m.Service == "fail":
			return status.Error(codes.NotFound, "nothing there: 100% sûr")
		}
		if err := s.SendMsg(&m); err != nil {
			return err
		}
	}
}

func (a *caller) flood(s grpc.ServerStream) error {
	var m healthpb.HealthCheckRequest
	if err := s.RecvMsg(&m); err != nil {
		return err
	}
	part := healthpb.HealthCheckRequest{Service: strings.Repeat("0123456789abcdef", 4<<10)}
	for range len(m.Service) {
		if err := s.SendMsg(&part); err != nil {
			return err
		}
	}
	return nil
}

var (
	talking  = &grpc.StreamDesc{StreamName: "Talk", ServerStreams: true, ClientStreams: true}
	flooding = &grpc.StreamDesc{StreamName: "Flood", ServerStreams: true}
)

// counted counts what its listener accepts.
type counted struct {
	net.Listener
	n *atomic.Int64
}

func (l counted) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n.Add(1)
	}
	return c, err
}

// caller serves until the test ends.
func (w *town) caller(o ...grpc.ServerOption) *caller {
	w.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	a := &caller{port: ln.Addr().(*net.TCPAddr).Port, began: make(chan context.Context, 1024), ended: make(chan error, 1024), health: health.NewServer()}
	unary := func(f func(context.Context, *healthpb.HealthCheckRequest) (any, error)) grpc.MethodHandler {
		return func(_ any, ctx context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			var m healthpb.HealthCheckRequest
			if err := dec(&m); err != nil {
				return nil, err
			}
			return f(ctx, &m)
		}
	}
	g := grpc.NewServer(append([]grpc.ServerOption{grpc.MaxRecvMsgSize(largest)}, o...)...)
	g.RegisterService(&grpc.ServiceDesc{
		ServiceName: "aether.test.Caller",
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: "Say", Handler: unary(a.say)}, {MethodName: "Wait", Handler: unary(a.wait)}},
		Streams: []grpc.StreamDesc{
			{StreamName: "Talk", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error { return a.talk(s) }},
			{StreamName: "Flood", ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error { return a.flood(s) }},
		},
	}, nil)
	healthpb.RegisterHealthServer(g, a.health)
	var wg sync.WaitGroup
	wg.Go(func() { _ = g.Serve(counted{ln, &a.conns}) })
	w.t.Cleanup(func() { g.Stop(); wg.Wait() })
	return a
}

// grpcMesh is two pods: web calls, cart answers at the given ports.
func (w *town) grpcMesh(ports, more string) (proxy string) {
	w.t.Helper()
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(strings.ReplaceAll("service shop/cart 127.0.0.2\npods shop/cart PORTS ip=127.1.0.1\nlocal shop/web cid=web\nlocal shop/cart PORTS cid=cart1\n"+more, "PORTS", ports))
	return at
}

// client of a name with a port, through the proxy at addr, until the test ends.
func (w *town) client(addr, authority string) *grpc.ClientConn {
	w.t.Helper()
	cc, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority(authority), grpc.WithNoProxy(), grpc.WithDisableRetry(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(largest), grpc.MaxCallSendMsgSize(largest)))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { cc.Close() })
	return cc
}

func cart(port int) string { return fmt.Sprintf("cart.shop.aether.internal:%d", port) }

func invoke(ctx context.Context, cc *grpc.ClientConn, method, in string, o ...grpc.CallOption) (string, error) {
	var out healthpb.HealthCheckRequest
	err := cc.Invoke(ctx, method, &healthpb.HealthCheckRequest{Service: in}, &out, o...)
	return out.Service, err
}

const sayMethod, waitMethod, talkMethod = "/aether.test.Caller/Say", "/aether.test.Caller/Wait", "/aether.test.Caller/Talk"

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestGRPCLocalAnswers (case 193): whatever a proxy answers by itself, on either side of the hop, a
// gRPC client is given a status that it can act upon and a message that says why. The
// statuses are those of gRPC's own table for proxies that do not know it.
func TestGRPCLocalAnswers(t *testing.T) {
	w := newTown(t)
	app := w.caller()
	dead := freePort(t)
	odd := oddApp(t)
	at := w.grpcMesh(fmt.Sprintf("%d=h2,%d=h2,%d=h2", app.port, dead, odd), fmt.Sprintf(`
service shop/empty 127.0.0.3 %[1]d=h2
pods shop/gone %[1]d=h2 ip=127.1.0.77
service shop/gone 127.0.0.4
service shop/cold 127.0.0.5 %[1]d=h2
catalog shop/cold
filter shop/nobody rbac policy=p;ns:nowhere
filter shop/in scope=inbound target=cart rbac deny policy=q;ns:shop;path:/private
route shop/cart cart:%[1]d
rule match=prefix:/admin use=nobody
rule match=exact:%[2]s timeout=30ms
rule match=exact:%[3]s timeout=1500ms
`, app.port, waitMethod, talkMethod))
	many := make([]string, 0, 2*120)
	for i := range 120 {
		many = append(many, fmt.Sprint("x-", i), "v")
	}
	for _, tt := range []struct {
		name, authority, method string
		fields                  []string
		code                    codes.Code
		message                 string // a part of it
	}{
		{name: "a port that is not declared (421)", authority: cart(1), code: codes.Unknown, message: "port-not-declared"},
		{name: "no such name (404)", authority: "nobody.shop.aether.internal:80", code: codes.Unimplemented, message: "no mesh service has this name"},
		{name: "no endpoint (503)", authority: fmt.Sprintf("empty:%d", app.port), code: codes.Unavailable, message: "no pod of service shop/empty"},
		{name: "rows that are not here (503)", authority: fmt.Sprintf("cold:%d", app.port), code: codes.Unavailable, message: "not yet"},
		{name: "no way to the destination (503)", authority: fmt.Sprintf("gone:%d", app.port), code: codes.Unavailable, message: "no connection to"},
		{name: "policy at the source (403)", method: "/admin/Do", code: codes.PermissionDenied, message: "RBAC: access denied"},
		{name: "a path in two spellings (403)", method: "/x/%2e%2e/admin", code: codes.PermissionDenied, message: "plain path"},
		{name: "policy at the destination (403)", method: "/private/Do", code: codes.PermissionDenied, message: "RBAC: access denied"},
		{name: "spellings, at the destination (403)", authority: cart(dead), method: "/%70rivate/Do", code: codes.PermissionDenied, message: "plain path"},
		{name: "an application that does not listen (503)", authority: cart(dead), code: codes.Unavailable, message: "does not listen"},
		{name: "a time limit of the route (504)", method: waitMethod, code: codes.DeadlineExceeded, message: "timeouts.request"},
		{name: "too many fields (431)", fields: many, code: codes.ResourceExhausted, message: "metadata is too large"},
		{name: "an application that breaks HTTP/2 (502)", authority: cart(odd), method: "/odd/broken", code: codes.Unavailable, message: "not valid HTTP"},
		{name: "one that goes without an answer (503)", authority: cart(odd), method: "/odd/gone", code: codes.Unavailable, message: "without an answer"},
		{name: "one that refuses every stream (503)", authority: cart(odd), method: "/odd/refused", code: codes.Unavailable, message: "refused"},
		{name: "the application's own, to compare (200)", method: "/aether.test.Caller/None", code: codes.Unimplemented, message: "unknown method None"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.authority == "" {
				tt.authority = cart(app.port)
			}
			if tt.method == "" {
				tt.method = sayMethod
			}
			ctx := metadata.AppendToOutgoingContext(bounded(t), tt.fields...)
			w.journal.drain()
			_, err := invoke(ctx, w.client(at, tt.authority), tt.method, "x")
			if s := status.Convert(err); s.Code() != tt.code || !strings.Contains(s.Message(), tt.message) {
				t.Errorf("%v %q, want %v with %q", s.Code(), s.Message(), tt.code, tt.message)
			}
			// What is counted is the status that is meant, at both ends, and not the 200 on the wire.
			for source := false; !source; {
				select {
				case e := <-w.journal.ch:
					source = e.Dir != model.Inbound
					if want := fmt.Sprintf("(%d)", e.Status); !strings.HasSuffix(tt.name, want) && (source || e.Local) {
						t.Errorf("recorded with status %d: %s", e.Status, e.String())
					}
				case <-time.After(20 * time.Second):
					t.Fatal("nothing was recorded")
				}
			}
		})
	}
	t.Run("a time limit in the middle of a stream", func(t *testing.T) {
		s, err := w.client(at, cart(app.port)).NewStream(bounded(t), talking, talkMethod)
		if err != nil {
			t.Fatal(err)
		}
		exchange(t, s, "hello")
		err = s.RecvMsg(&healthpb.HealthCheckRequest{})
		if st := status.Convert(err); st.Code() != codes.DeadlineExceeded || !strings.Contains(st.Message(), "timeouts.request") {
			t.Errorf("%v, want the limit's name", err)
		}
	})
}

// drain forgets what was recorded so far.
func (o *told) drain() {
	for {
		select {
		case <-o.ch:
		default:
			return
		}
	}
}

// exchange says a message on a stream and wants it back.
func exchange(t *testing.T, s grpc.ClientStream, text string) {
	t.Helper()
	m := healthpb.HealthCheckRequest{Service: text}
	if err := s.SendMsg(&m); err != nil {
		t.Fatalf("%s: send: %v", text, err)
	}
	if err := s.RecvMsg(&m); err != nil || m.Service != text {
		t.Fatalf("%s: received %q, %v", text, m.Service, err)
	}
}

// freePort is one that nobody listens on.
func freePort(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

// framed serves HTTP/2 frame by frame, until the test ends: f is called with each that comes.
// A connection ends when f says so.
func framed(t *testing.T, f func(fr *http2.Framer, frame http2.Frame, path string) bool) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	var wg sync.WaitGroup
	serve := func(c net.Conn) {
		defer c.Close()
		if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
			return
		}
		fr := http2.NewFramer(c, c)
		fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		if fr.WriteSettings() != nil {
			return
		}
		for {
			frame, err := fr.ReadFrame()
			if err != nil {
				return
			}
			path := ""
			switch frame := frame.(type) {
			case *http2.SettingsFrame:
				if !frame.IsAck() {
					_ = fr.WriteSettingsAck()
				}
			case *http2.PingFrame:
				if !frame.IsAck() {
					_ = fr.WritePing(true, frame.Data)
				}
			case *http2.MetaHeadersFrame:
				path = frame.PseudoValue("path")
			}
			if !f(fr, frame, path) {
				return
			}
		}
	}
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = true
			mu.Unlock()
			wg.Go(func() { serve(c) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return ln.Addr().(*net.TCPAddr).Port
}

// fields writes a head, or trailers.
func fields(fr *http2.Framer, to http2.Frame, end bool, kv ...string) {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for i := 0; i < len(kv); i += 2 {
		_ = e.WriteField(hpack.HeaderField{Name: kv[i], Value: kv[i+1]})
	}
	_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: to.Header().StreamID, BlockFragment: b.Bytes(), EndHeaders: true, EndStream: end})
}

const tooBig = "that is more than I take\n"

// oddApp does to each request what its path says.
func oddApp(t *testing.T) int {
	return framed(t, func(fr *http2.Framer, frame http2.Frame, path string) bool {
		switch path {
		case "/odd/broken":
			_ = fr.WriteRawFrame(http2.FrameHeaders, http2.FlagHeadersEndHeaders, frame.Header().StreamID, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		case "/odd/gone":
			return false
		case "/odd/refused":
			_ = fr.WriteRSTStream(frame.Header().StreamID, http2.ErrCodeRefusedStream)
		case "/odd/hints": // an interim head first, then an empty message
			fields(fr, frame, false, ":status", "103", "link", "x")
			fields(fr, frame, false, ":status", "200", "content-type", "application/grpc")
			_ = fr.WriteData(frame.Header().StreamID, false, make([]byte, 5))
			fields(fr, frame, true, "grpc-status", "0")
		case "/odd/early": // the whole answer while the request is on its way, whose rest is not wanted
			fields(fr, frame, false, ":status", "413", "content-type", "text/plain")
			_ = fr.WriteData(frame.Header().StreamID, true, []byte(tooBig))
			_ = fr.WriteRSTStream(frame.Header().StreamID, http2.ErrCodeNo)
		}
		return true
	})
}

// TestGRPCDeadline: a call's time limit reaches the application as it was set, and a call that is over for its
// client, by its limit or by its will, is over for the application.
func TestGRPCDeadline(t *testing.T) {
	w := newTown(t)
	app := w.caller()
	cc := w.client(w.grpcMesh(fmt.Sprintf("%d=h2", app.port), ""), cart(app.port))
	over := func(t *testing.T) {
		t.Helper()
		select {
		case err := <-app.ended:
			if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the application's call ended by %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the application's call goes on")
		}
	}
	if _, err := invoke(bounded(t), cc, sayMethod, ""); err != nil { // the way is there: what follows is quick
		t.Fatal(err)
	}
	t.Run("limit", func(t *testing.T) {
		const limit = time.Second
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		_, err := invoke(ctx, cc, waitMethod, "")
		if status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("%v, want DeadlineExceeded", err)
		}
		select {
		case call := <-app.began: // it counts from when the call has arrived
			if at, ok := call.Deadline(); !ok || at.Before(start.Add(limit-time.Millisecond)) || at.After(time.Now().Add(limit)) {
				t.Errorf("the application's limit is %v (%v), the client's %v", at, ok, start.Add(limit))
			}
		default:
			t.Fatal("the call did not arrive within its limit")
		}
		over(t)
	})
	t.Run("no limit", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() { _, err := invoke(ctx, cc, waitMethod, ""); done <- err }()
		if at, ok := (<-app.began).Deadline(); ok {
			t.Errorf("the application was given a limit, %v, that nobody set", at)
		}
		cancel() // by the client's will, and no limit's
		if err := <-done; status.Code(err) != codes.Canceled {
			t.Errorf("%v, want Canceled", err)
		}
		over(t)
	})
}

// TestGRPCBig: messages of 4 MiB both ways, and a stream of 64 MiB, arrive whole.
func TestGRPCBig(t *testing.T) {
	w := newTown(t)
	app := w.caller()
	cc := w.client(w.grpcMesh(fmt.Sprintf("%d=h2", app.port), ""), cart(app.port))
	ctx := bounded(t)
	big := strings.Repeat("fourMiB.", 512<<10)
	if out, err := invoke(ctx, cc, sayMethod, big); err != nil || out != big {
		t.Errorf("4 MiB: %d bytes, %v", len(out), err)
	}
	const parts = 1024 // of 64 KiB
	s, err := cc.NewStream(ctx, flooding, "/aether.test.Caller/Flood")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SendMsg(&healthpb.HealthCheckRequest{Service: strings.Repeat("x", parts)}); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	want := strings.Repeat("0123456789abcdef", 4<<10)
	n := 0
	for ; ; n++ {
		var m healthpb.HealthCheckRequest
		if err := s.RecvMsg(&m); err != nil {
			if !errors.Is(err, io.EOF) {
				t.Fatalf("after %d messages: %v", n, err)
			}
			break
		}
		if m.Service != want {
			t.Fatalf("message %d: %d bytes, not those that were sent", n, len(m.Service))
		}
	}
	if n != parts {
		t.Errorf("%d messages of %d", n, parts)
	}
}

// TestGRPCHealth: grpc.health.v1, both ways of asking.
func TestGRPCHealth(t *testing.T) {
	w := newTown(t)
	app := w.caller()
	c := healthpb.NewHealthClient(w.client(w.grpcMesh(fmt.Sprintf("%d=h2", app.port), ""), cart(app.port)))
	ctx := bounded(t)
	if r, err := c.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil || r.Status != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("the server: %v, %v", r, err)
	}
	if _, err := c.Check(ctx, &healthpb.HealthCheckRequest{Service: "other"}); status.Code(err) != codes.NotFound {
		t.Errorf("a service that nobody knows: %v", err)
	}
	s, err := c.Watch(ctx, &healthpb.HealthCheckRequest{Service: "shop"})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []healthpb.HealthCheckResponse_ServingStatus{
		healthpb.HealthCheckResponse_SERVICE_UNKNOWN, healthpb.HealthCheckResponse_SERVING, healthpb.HealthCheckResponse_NOT_SERVING,
	} {
		if want != healthpb.HealthCheckResponse_SERVICE_UNKNOWN {
			app.health.SetServingStatus("shop", want)
		}
		if r, err := s.Recv(); err != nil || r.Status != want {
			t.Fatalf("watched: %v, %v, want %v", r, err, want)
		}
	}
}

// TestGRPCConnectionAge (case 68): a server that ends connections by age. The calls of one that waits for them never fail
// by it; a stream that another cuts off ends with UNAVAILABLE, and not with a broken connection.
func TestGRPCConnectionAge(t *testing.T) {
	w := newTown(t)
	patient := w.caller(grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: 30 * time.Millisecond}))
	hasty := w.caller(grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: 300 * time.Millisecond, MaxConnectionAgeGrace: 30 * time.Millisecond}))
	at := w.grpcMesh(fmt.Sprintf("%d=h2,%d=h2", patient.port, hasty.port), "")
	ctx := bounded(t)

	cc := w.client(at, cart(patient.port))
	s, err := cc.NewStream(ctx, talking, talkMethod)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for ; patient.conns.Load() < 8; n++ { // that many connections grow old
		exchange(t, s, fmt.Sprint("message ", n)) // on the first of them
		if out, err := invoke(ctx, cc, sayMethod, fmt.Sprint(n)); err != nil || out != fmt.Sprint(n) {
			t.Fatalf("call %d, on connection %d: %q, %v", n, patient.conns.Load(), out, err)
		}
	}
	t.Logf("%d calls over %d connections", n, patient.conns.Load())

	if s, err = w.client(at, cart(hasty.port)).NewStream(ctx, talking, talkMethod); err != nil {
		t.Fatal(err)
	}
	exchange(t, s, "begun")
	if err := s.RecvMsg(&healthpb.HealthCheckRequest{}); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "without a status") {
		t.Errorf("the stream ended by %v, want Unavailable, of the proxy's making", err)
	}
}

// TestGRPCManyStreams: more calls at once than the application takes on a connection have theirs on
// further ones, and it never sees more on one than it allows (grpc-go would refuse the stream).
func TestGRPCManyStreams(t *testing.T) {
	const each, calls = 4, 60
	w := newTown(t)
	app := w.caller(grpc.MaxConcurrentStreams(each))
	cc := w.client(w.grpcMesh(fmt.Sprintf("%d=h2", app.port), ""), cart(app.port))
	ctx, cancel := context.WithCancel(bounded(t))
	var wg sync.WaitGroup
	var failed atomic.Int64
	for range calls {
		wg.Go(func() {
			if _, err := invoke(ctx, cc, waitMethod, ""); status.Code(err) != codes.Canceled {
				failed.Add(1)
				t.Error(err)
			}
		})
	}
	for range calls { // none of them waits for another one's end
		select {
		case <-app.began:
		case <-ctx.Done():
			t.Fatalf("%d of %d calls at once", app.most.Load(), calls)
		}
	}
	cancel()
	wg.Wait()
	if n := app.conns.Load(); n < calls/each || n > 32 {
		t.Errorf("%d calls at once on %d connections of %d streams", calls, n, each)
	}
	if out, err := invoke(bounded(t), cc, sayMethod, "after"); err != nil || out != "after" {
		t.Errorf("after that: %q, %v", out, err)
	}
}

// TestGRPCInterim (case 195): a 103 before the head of an answer is passed on, and is not the answer.
func TestGRPCInterim(t *testing.T) {
	w := newTown(t)
	odd := oddApp(t)
	cc := w.client(w.grpcMesh(fmt.Sprintf("%d=h2", odd), ""), cart(odd))
	if _, err := invoke(bounded(t), cc, "/odd/hints", "x"); err != nil {
		t.Error(err)
	}
}

// endless is a body without end, which tells when it was closed.
type endless struct{ closed chan struct{} }

func (b *endless) Read(p []byte) (int, error) {
	select {
	case <-b.closed:
		return 0, net.ErrClosed
	default:
		return len(p), nil
	}
}

func (b *endless) Close() error {
	close(b.closed)
	return nil
}

// TestEarlyAnswerThenReset (cases 65, 71): an application that answers while the upload runs and resets the stream with
// NO_ERROR is heard out, where requests are kept for retries too; the upload ends there.
func TestEarlyAnswerThenReset(t *testing.T) {
	w := newTown(t)
	odd := oddApp(t)
	at := w.grpcMesh(fmt.Sprintf("%d=h2", odd), fmt.Sprintf("route shop/cart cart:%d\nrule match=prefix:/odd retry=503;attempts=2\n", odd))
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("h2 %v", h2), func(t *testing.T) {
			tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", at)
			}}
			tr.Protocols.SetHTTP1(!h2)
			tr.Protocols.SetUnencryptedHTTP2(h2)
			defer tr.CloseIdleConnections()
			for range 5 {
				body := &endless{make(chan struct{})}
				req, err := http.NewRequestWithContext(bounded(t), "POST", "http://"+cart(odd)+"/odd/early", body)
				if err != nil {
					t.Fatal(err)
				}
				res, err := tr.RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(res.Body)
				res.Body.Close()
				if res.StatusCode != 413 || string(b) != tooBig || err != nil {
					t.Errorf("%s %q, %v", res.Status, b, err)
				}
				<-body.closed // and it has stopped sending
			}
		})
	}
}

// TestClientGoesInAnUpload (case 66): the application's stream is reset with CANCEL, on a connection that lives on.
func TestClientGoesInAnUpload(t *testing.T) {
	began, reset := make(chan struct{}, 16), make(chan http2.ErrCode, 16)
	app := framed(t, func(_ *http2.Framer, frame http2.Frame, path string) bool {
		switch f := frame.(type) {
		case *http2.DataFrame:
			select {
			case began <- struct{}{}:
			default:
			}
		case *http2.RSTStreamFrame:
			reset <- f.ErrCode
		}
		return true
	})
	w := newTown(t)
	at := w.grpcMesh(fmt.Sprintf("%d=h2", app), "")
	for range 3 {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: %s\r\nContent-Length: 100000\r\n\r\nthe beginning of it", cart(app))
		<-began
		c.Close()
		select {
		case code := <-reset:
			if code != http2.ErrCodeCancel {
				t.Errorf("reset with %v, want CANCEL", code)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the application's stream stays open")
		}
	}
}

// TestCloseOverHTTP2 (case 54): a client that wants its connection closed says so in HTTP/1 only.
func TestCloseOverHTTP2(t *testing.T) {
	w := newTown(t)
	port := w.app()
	at := w.grpcMesh(fmt.Sprint(port), "")
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", at)
	}}
	tr.Protocols.SetUnencryptedHTTP2(true)
	for range 3 {
		req, err := http.NewRequestWithContext(bounded(t), "GET", "http://"+cart(port)+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Close = true
		res, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode != 200 || err != nil || res.Header.Get("Connection") != "" {
			t.Errorf("%s %q, %v, Connection %q", res.Status, b, err, res.Header.Get("Connection"))
		}
	}
}

// TestBothProtocolsAtOnePort (case 74): what a port speaks is the application's matter. Clients of HTTP/1 and of HTTP/2, a
// connection each, are served by an application that is declared h2c and speaks nothing else; an Upgrade, which such
// an application does not take, is refused with that reason.
func TestBothProtocolsAtOnePort(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, r.Proto) })}
	srv.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	t.Cleanup(func() { srv.Close(); wg.Wait() })
	port := ln.Addr().(*net.TCPAddr).Port
	w := newTown(t)
	at := w.grpcMesh(fmt.Sprintf("%d=h2", port), "")
	get := func(h2, upgrade bool) string {
		tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", at)
		}}
		tr.Protocols.SetHTTP1(!h2)
		tr.Protocols.SetUnencryptedHTTP2(h2)
		defer tr.CloseIdleConnections()
		req, err := http.NewRequestWithContext(bounded(t), "GET", "http://"+cart(port)+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		if upgrade {
			req.Header.Set("Connection", "Upgrade")
			req.Header.Set("Upgrade", "websocket")
			req.Header.Set("Sec-WebSocket-Version", "13")
			req.Header.Set("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
		}
		res, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%d %s", res.StatusCode, b)
	}
	for range 2 {
		if got := get(true, false); got != "200 HTTP/2.0" {
			t.Errorf("HTTP/2: %s", got)
		}
		if got := get(false, false); got != "200 HTTP/2.0" {
			t.Errorf("HTTP/1: %s", got)
		}
		if got := get(false, true); !strings.HasPrefix(got, "501 upgrade-not-supported") {
			t.Errorf("an upgrade: %s", got)
		}
	}
}

// slowTown is a town on a clock that the test moves. Each step is short against the limits
// of the engine's questions (five seconds), and after each the loop, which carries both ends of a hop, goes
// round until nothing is left to do.
func slowTown(t *testing.T) (w *town, move func(d time.Duration)) {
	t.Helper()
	var now atomic.Int64
	now.Store(int64(time.Hour))
	wall := func() time.Time { return w.wall() }
	w = newTownOn(t, engine.Config{Now: now.Load, MaxLoops: 1}, func(o *outbound.Config, i *inbound.Config) { o.Dialer.Now, i.Acceptor.Now = wall, wall })
	w.life = 48 * time.Hour // where nobody renews it
	begun := time.Now()
	w.wall = func() time.Time { return begun.Add(time.Duration(now.Load()) - time.Hour) }
	ca, err := devca.Open(t.TempDir(), "td", w.wall)
	if err != nil {
		t.Fatal(err)
	}
	w.ca = ca
	l := w.engine.Loops()[0]
	return w, func(d time.Duration) {
		t.Helper()
		for ; d > 0; d -= 2 * time.Second {
			now.Add(int64(min(d, 2*time.Second)))
			for idle := 0; idle < 5; idle++ {
				before := l.Stats().Events
				done := make(chan struct{})
				if err := l.Post(func() { close(done) }); err != nil {
					t.Fatal(err)
				}
				<-done
				if l.Stats().Events > before+1 { // more than the post's own
					idle = 0
				}
			}
		}
	}
}

// TestGRPCHour: a stream with a message every four minutes lives longer than an hour. The server, which is
// grpc-go's, would end the connection of a client that asks it more often than every five minutes of its own
// clock whether it lives: it is never asked. Both ends renew their certificates meanwhile, of half an hour. A stream on which nothing moves for idleStream is ended.
func TestGRPCHour(t *testing.T) {
	w, move := slowTown(t)
	w.life = 32 * time.Minute
	app := w.caller()
	cc := w.client(w.grpcMesh(fmt.Sprintf("%d=h2", app.port), ""), cart(app.port))
	ctx, cancel := context.WithCancel(t.Context()) // without a deadline, which would be met on the town's clock
	defer time.AfterFunc(60*time.Second, cancel).Stop()
	s, err := cc.NewStream(ctx, talking, talkMethod)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 17 {
		exchange(t, s, fmt.Sprintf("after %d minutes", 4*i))
		switch i % 4 { // each at half of its certificate's life, as SPIRE does
		case 1:
			w.rotate("web", issue(t, w.ca, "web", 32*time.Minute))
		case 3:
			w.rotate("cart1", issue(t, w.ca, "cart", 32*time.Minute))
		}
		move(4 * time.Minute)
	}
	exchange(t, s, "the last one")
	if n := app.conns.Load(); n != 1 {
		t.Errorf("%d connections to the application", n)
	}
	end := make(chan error, 1)
	go func() { end <- s.RecvMsg(&healthpb.HealthCheckRequest{}) }()
	move(5*time.Minute - 4*time.Second)
	select {
	case err := <-end:
		t.Fatalf("ended too early: %v", err)
	default:
	}
	move(8 * time.Second)
	select {
	case err := <-end:
		if status.Code(err) != codes.Unavailable {
			t.Errorf("a silent stream ended by %v, want Unavailable", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("a silent stream goes on")
	}
	if out, err := invoke(bounded(t), cc, sayMethod, "next"); err != nil || out != "next" {
		t.Errorf("the next call: %q, %v", out, err)
	}
}

// TestGRPCKeepalive: a client that asks every ten seconds for an hour whether we live, with no call or with one that
// waits (grpc-go's shortest time, and PermitWithoutStream), is answered each time and told to go never.
func TestGRPCKeepalive(t *testing.T) {
	for _, call := range []bool{false, true} {
		t.Run(fmt.Sprintf("call %v", call), func(t *testing.T) {
			w, move := slowTown(t)
			app := w.caller()
			at := w.grpcMesh(fmt.Sprintf("%d=h2", app.port), "")
			c, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(60 * time.Second))
			io.WriteString(c, http2.ClientPreface)
			fr := http2.NewFramer(c, c)
			if err := fr.WriteSettings(); err != nil {
				t.Fatal(err)
			}
			message := []byte("\x00\x00\x00\x00\x03\x0a\x01x") // HealthCheckRequest{"x"}
			if call {
				var b bytes.Buffer
				e := hpack.NewEncoder(&b)
				for _, f := range []hpack.HeaderField{{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: talkMethod},
					{Name: ":authority", Value: cart(app.port)}, {Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"}} {
					_ = e.WriteField(f)
				}
				_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b.Bytes(), EndHeaders: true})
			}
			for i := range 360 {
				if call && i%24 == 0 { // every four minutes
					if err := fr.WriteData(1, false, message); err != nil {
						t.Fatal(err)
					}
				}
				if err := fr.WritePing(false, [8]byte{7: byte(i)}); err != nil {
					t.Fatal(err)
				}
				for answered := false; !answered; {
					f, err := fr.ReadFrame()
					if err != nil {
						t.Fatalf("at %d s: %v", 10*i, err)
					}
					switch f := f.(type) {
					case *http2.PingFrame:
						answered = f.IsAck() && f.Data[7] == byte(i)
					case *http2.GoAwayFrame:
						t.Fatalf("at %d s: told to go: %v", 10*i, f.ErrCode)
					case *http2.RSTStreamFrame:
						t.Fatalf("at %d s: the call was reset: %v", 10*i, f.ErrCode)
					}
				}
				move(10 * time.Second)
			}
		})
	}
}
