package engine

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
)

// described is a ConnInfo.User.
type described string

func (d described) Describe(s *ConnState) { s.Role = string(d) }

// open tells of what the stage's loops carry.
func (s *stage) open(pod string, limit int) (list []ConnState, total int) {
	s.t.Helper()
	type part struct {
		list  []ConnState
		total int
	}
	parts, silent := Ask(s.t.Context(), s.e, func(l *Loop) part {
		list, total := l.Conns(pod, limit)
		return part{list, total}
	})
	if len(silent) > 0 {
		s.t.Errorf("loops %v did not answer", silent)
	}
	for _, p := range parts {
		list, total = append(list, p.list...), total+p.total
	}
	return list, total
}

// TestOpenConnections: a connection is shown as it stands, with its ages by the loop's clock.
func TestOpenConnections(t *testing.T) {
	clk := newClock()
	s := newStage(t, Config{Now: clk.Now})
	pod, other := s.e.AddPod("shop/web-1"), s.e.AddPod("shop/web-2")
	asked, goOn := make(chan struct{}), make(chan struct{})
	v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
		r := bufio.NewReader(c)
		for line := ""; line != "\r\n"; {
			var err error
			if line, err = r.ReadString('\n'); err != nil {
				return
			}
		}
		close(asked)
		<-goOn
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		r.ReadByte()
	})}
	pool := &exchange.Pool{Service: v}
	addr := s.listen(pod, func(l *Loop, fd int) {
		if err := l.ServeHTTP1(fd, nil, &ConnInfo{Pod: pod, Loop: l, Pool: pool, User: described("captured")}, nil); err != nil {
			unix.Close(fd)
		}
	})
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	io.WriteString(c, request)
	<-asked
	clk.now.Add(int64(1500 * time.Millisecond))
	// An iteration of the loop takes the time; the question's own does.
	find := func(list []ConnState, role string) *ConnState {
		t.Helper()
		i := slices.IndexFunc(list, func(s ConnState) bool { return s.Role == role })
		if i < 0 {
			t.Fatalf("no connection of role %s: %+v", role, list)
		}
		return &list[i]
	}
	list, total := s.open("", 10)
	if total != 2 || len(list) != 2 {
		t.Fatalf("%d of %d connections, want 2: %+v", len(list), total, list)
	}
	down, up := find(list, "captured"), find(list, "application")
	if down.Pod != "shop/web-1" || down.Protocol != "http1" || down.State != "response" || down.Requests != 1 || down.Streams != 1 ||
		down.BytesIn != int64(len(request)) || down.BytesOut != 0 || down.AgeMS != 1500 || down.IdleMS != 1500 || down.Client.String() != c.LocalAddr().String() {
		t.Errorf("%+v", *down)
	}
	if up.Destination != v.to || up.State != "request" || up.Requests != 1 || up.BytesOut == 0 || up.BytesIn != 0 {
		t.Errorf("%+v", *up)
	}
	if list, total := s.open("shop/web-1", 1); len(list) != 1 || total != 2 {
		t.Errorf("with a limit of 1: %d of %d", len(list), total)
	}
	if list, total := s.open("shop/web-2", 10); len(list) != 0 || total != 0 {
		t.Errorf("of another pod: %+v", list)
	}
	close(goOn)
	res := make([]byte, 4096)
	if n, err := c.Read(res); err != nil || !strings.HasSuffix(string(res[:n]), "ok") {
		t.Fatalf("%q %v", res[:n], err)
	}
	eventually(t, "both rest", func() bool {
		list, _ := s.open("", 10)
		return len(list) == 2 && list[0].State == "idle" && list[1].State == "idle"
	})
	s.e.RemovePod(pod)
	s.e.RemovePod(other)
	if list, total := s.open("", 10); total != 0 {
		t.Errorf("of a pod that was removed: %+v", list)
	}
}

// TestOpenSessions: a hop session is shown with what it carries, and until when it may.
func TestOpenSessions(t *testing.T) {
	clk := newClock()
	s := newStage(t, Config{Now: clk.Now})
	pod := s.e.AddPod("shop/web-1")
	defer s.e.RemovePod(pod)
	var hop *Hop
	v := &svc{pod: pod, hop: plainHop(pod, serveHTTP(t, http.NotFoundHandler()).String(), &hop)}
	addr := s.front(pod, v, false)
	sessions := func() (list []SessionState) {
		answers, silent := Ask(t.Context(), s.e, func(l *Loop) (list []SessionState) {
			for r := range pod.share(l).resources {
				if h, ok := r.(*Hop); ok {
					h.Sessions(time.Unix(1000, 0), func(s SessionState) { list = append(list, s) })
				}
			}
			return list
		})
		if len(silent) > 0 {
			t.Errorf("loops %v did not answer", silent)
		}
		return slices.Concat(answers...)
	}
	if got := sessions(); len(got) != 0 {
		t.Fatalf("before the first request: %+v", got)
	}
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 404") {
		t.Fatalf("%q %v", line, err)
	}
	clk.now.Add(int64(2 * time.Second))
	got := sessions()
	if len(got) != 1 || got[0].Pod != "shop/web-1" || got[0].State != "ready" || got[0].Requests != 1 || got[0].Waiting != 0 ||
		got[0].AgeMS != 2000 || got[0].BytesIn == 0 || got[0].BytesOut == 0 || !got[0].Until.After(time.Unix(1000, 0)) {
		t.Errorf("%+v", got)
	}
	var n int64
	for _, l := range s.e.Loops() {
		n += l.Gauges.Sessions.Load()
	}
	if n != 1 {
		t.Errorf("%d sessions counted, want 1", n)
	}
}

// TestAskOfAStuckLoop: a loop that does not answer is named, is not asked again before
// it has, and answers once it can.
func TestAskOfAStuckLoop(t *testing.T) {
	s := newStage(t, Config{})
	l := s.e.Loops()[0]
	stuck, letGo := make(chan struct{}), make(chan struct{})
	if err := l.Post(func() { close(stuck); <-letGo }); err != nil {
		t.Fatal(err)
	}
	<-stuck
	runs := 0
	ask := func(ctx context.Context) (answers []int, silent []int) {
		return Ask(ctx, s.e, func(*Loop) int { runs++; return 7 })
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if a, silent := ask(ctx); len(a) != 0 || !slices.Equal(silent, []int{0}) {
		t.Errorf("a loop that is stuck answered %v, silent %v", a, silent)
	}
	for range 100 { // at once, although nothing ends the context
		if a, silent := ask(t.Context()); len(a) != 0 || !slices.Equal(silent, []int{0}) {
			t.Fatalf("asked again it answered %v, silent %v", a, silent)
		}
	}
	close(letGo)
	eventually(t, "it answers", func() bool {
		a, _ := ask(t.Context())
		return slices.Equal(a, []int{7})
	})
	if runs != 2 {
		t.Errorf("the questions of %d callers were put, want 2: the first and the last", runs)
	}
}

// TestRefusedIsTold: what the engine answers itself, no exchange tells of.
func TestRefusedIsTold(t *testing.T) {
	clk := newClock()
	s := newStage(t, Config{Now: clk.Now})
	pod := s.e.AddPod("p")
	defer s.e.RemovePod(pod)
	type refusal struct {
		status int
		why    string
	}
	told := make(chan refusal, 16)
	v := &svc{pod: pod, to: newEcho(t)}
	front := func(h2 bool) string {
		return s.listen(pod, func(l *Loop, fd int) {
			serve := l.ServeHTTP1
			if h2 {
				serve = l.ServeHTTP2
			}
			info := &ConnInfo{Pod: pod, Loop: l, Pool: &exchange.Pool{Service: v}, OnRefused: func(_ *ConnInfo, status int, why error) { told <- refusal{status, FaultOf(why)} }}
			if err := serve(fd, nil, info, nil); err != nil {
				unix.Close(fd)
			}
		})
	}
	want := func(what string, status int, why string) {
		t.Helper()
		select {
		case got := <-told:
			if got.status != status || !strings.Contains(got.why, why) {
				t.Errorf("%s: told of %v, want %d and %s", what, got, status, why)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: nobody was told", what)
		}
	}
	h1 := front(false)
	for _, tt := range []struct {
		what, bytes string
		status      int
		why         string
	}{
		{"no HTTP", "nonsense\r\n\r\n", 400, "malformed method: want a token and one space (RFC 9112 3.1); in the first line, byte 0x0d"},
		{"two lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "several Content-Length"},
		{"a long target", "GET /" + strings.Repeat("a", 20<<10) + " HTTP/1.1\r\nHost: a\r\n\r\n", 414, "target is too long: shorten the URL; at most 16384 bytes"},
		{"many fields", "GET / HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("x: y\r\n", 200) + "\r\n", 431, "too many field lines: send fewer; at most 100"},
	} {
		c, err := net.Dial("tcp", h1)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, tt.bytes)
		want(tt.what, tt.status, tt.why)
		br := bufio.NewReader(c)
		if line, err := br.ReadString('\n'); err != nil || !strings.HasPrefix(line, fmt.Sprintf("HTTP/1.1 %d ", tt.status)) {
			t.Errorf("%s: %q %v", tt.what, line, err)
		}
		if rest, _ := io.ReadAll(br); !strings.HasSuffix(string(rest), tt.why+"\n") && !strings.Contains(string(rest), "\r\n\r\n"+tt.why) {
			t.Errorf("%s: the client reads %q", tt.what, rest)
		}
		c.Close()
	}
	h2 := front(true)
	dial := func() net.Conn {
		c, err := net.Dial("tcp", h2)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	p := newPeer2(t, dial().(*net.TCPConn), true)
	many := []string{":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/"}
	for i := range 200 {
		many = append(many, fmt.Sprintf("x-%d", i), "y")
	}
	p.head(1, true, many...)
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	want("many fields of HTTP/2", 431, "too many fields: send fewer; at most 100")
	p.head(3, true, ":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/", "x y", "z")
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	want("a space in a name of HTTP/2", 400, "field 'x y', byte 0x20")
	io.WriteString(dial(), oracle.ClientPreface+"\x00\x00\x01\x04\x00\x00\x00\x00\x00x") // SETTINGS of one byte
	want("a broken frame", 400, "SETTINGS of a wrong length (6.5)")
	if n := v.begun.Load(); n != 0 {
		t.Errorf("%d requests began", n)
	}
	select {
	case got := <-told:
		t.Errorf("told once more, of %v", got)
	default:
	}
}

// TestHowAClientOfHTTP2Goes: it resets a stream, closes its connection, or breaks the protocol.
func TestHowAClientOfHTTP2Goes(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	defer s.e.RemovePod(pod)
	v := &svc{pod: pod, request: func(x *exchange.Exchange) bool { x.Park(); return true }} // never answered
	addr := s.front(pod, v, true)
	for i, tt := range []struct {
		want string
		do   func(p *peer2, c *net.TCPConn)
	}{
		{"client reset 0", func(p *peer2, _ *net.TCPConn) { p.WriteRSTStream(1, oracle.ErrCodeCancel); p.flush() }},
		{"client cancel 0", func(_ *peer2, c *net.TCPConn) { c.Close() }},
		{"client protocol 0", func(p *peer2, _ *net.TCPConn) { p.WriteRawFrame(oracle.FrameData, 0, 0, []byte("x")); p.flush() }},
	} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		p := newPeer2(t, c.(*net.TCPConn), true)
		p.get(1, "/")
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the request", func() bool { return v.begun.Load() == int64(i+1) })
		tt.do(p, c.(*net.TCPConn))
		eventually(t, "its end", func() bool { return v.done.Load() == int64(i+1) })
		if got := *v.last.Load(); got != tt.want {
			t.Errorf("%s, want %s", got, tt.want)
		}
	}
}
