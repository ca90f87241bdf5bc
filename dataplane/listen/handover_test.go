package listen_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/listen"
	"aether/tproxy/netns/netnstest"
)

func openFDs(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// noLeak fails the test if descriptors are left when it has ended, and what it registered later too.
func noLeak(t *testing.T) {
	t.Helper()
	if ln, err := net.Listen("tcp", "127.0.0.1:0"); err == nil { // Go's poller has descriptors of its own, from first use on
		ln.Close()
	}
	before := openFDs(t)
	t.Cleanup(func() {
		for end := time.Now().Add(10 * time.Second); openFDs(t) > before; {
			if time.Now().After(end) {
				t.Errorf("%d descriptors are open, %d were", openFDs(t), before)
				return
			}
		}
	})
}

// offered is a running offer and what it has said.
type offered struct {
	path string
	said chan string // Begin, Failed, Taken, in order
	end  chan bool   // of Serve: taken
	stop context.CancelFunc
}

func offer(t *testing.T, o *listen.Owner, path string) *offered {
	t.Helper()
	of := &offered{path: path, said: make(chan string, 100), end: make(chan bool, 1)}
	f, err := listen.NewOffer(path, listen.OfferConfig{
		Owner: o,
		Begin: func() { of.said <- "begin" }, Failed: func(err error) { of.said <- "failed: " + err.Error() },
		Taken: func() {
			if err := o.Close(); err != nil {
				t.Error(err)
			}
			of.said <- "taken"
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	of.stop = cancel
	var wg sync.WaitGroup
	wg.Go(func() {
		taken, err := f.Serve(ctx)
		if err != nil {
			t.Error(err)
		}
		of.end <- taken
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return of
}

func (of *offered) expect(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-of.said:
		if !strings.HasPrefix(got, want) {
			t.Errorf("the offer says %q, want %q", got, want)
		}
	case <-time.After(10 * time.Second):
		t.Fatalf("the offer does not say %q", want)
	}
}

func short(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// many gives o more sockets than one message carries, all of one port.
func many(t *testing.T, o *listen.Owner, n int) {
	t.Helper()
	ns := netnstest.New(t)
	s := open(t, o, ns, "pod")
	for i := range n {
		fd, err := unix.FcntlInt(uintptr(s.Mesh), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := o.Inherit(listen.Key{Container: fmt.Sprint("pod", i), Role: listen.Mesh}, fd); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTakeOver: a successor has every socket under its key, and the old process is told
// when it accepts, and not before. The next one takes over from it by the same path.
func TestTakeOver(t *testing.T) {
	noLeak(t)
	path := filepath.Join(t.TempDir(), "handover")
	old := newOwner(t)
	many(t, old, 150)
	want := fmt.Sprint(old.Keys())
	of := offer(t, old, path)
	if info, err := os.Lstat(path); err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("%v, %v, want a socket for its owner alone", info.Mode(), err)
	}
	for round := range 3 {
		next := newOwner(t)
		p, err := listen.TakeOver(short(t, 10*time.Second), path, next)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(next.Keys()); got != want || p.Sockets != 154 || len(p.Left) != 0 {
			t.Errorf("round %d: %d sockets, left %v, keys %s", round, p.Sockets, p.Left, got)
		}
		of.expect(t, "begin")
		select {
		case s := <-of.said:
			t.Errorf("before the successor is ready: %q", s)
		default:
		}
		if err := p.Ready(short(t, 10*time.Second)); err != nil {
			t.Error(err)
		}
		of.expect(t, "taken")
		if taken := <-of.end; !taken {
			t.Error("the offer has ended, and does not know that it was taken")
		}
		of = offer(t, next, path)
	}
	of.stop()
	if taken := <-of.end; taken {
		t.Error("an offer that nobody took was taken")
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its path stays: %v", err)
	}
	if _, err := listen.TakeOver(short(t, time.Second), path, newOwner(t)); !errors.Is(err, listen.ErrNoPredecessor) {
		t.Errorf("nobody is there: %v", err)
	}
}

// TestSuccessorEnds: one that ends before it accepts leaves everything as it was; while it is
// there another waits, and has its turn then.
func TestSuccessorEnds(t *testing.T) {
	noLeak(t)
	path := filepath.Join(t.TempDir(), "handover")
	old := newOwner(t)
	many(t, old, 3)
	of := offer(t, old, path)
	first, second := newOwner(t), newOwner(t)
	p, err := listen.TakeOver(short(t, 10*time.Second), path, first)
	if err != nil {
		t.Fatal(err)
	}
	of.expect(t, "begin")
	if _, err := listen.TakeOver(short(t, 300*time.Millisecond), path, second); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a second one meanwhile: %v", err)
	}
	res := make(chan error, 1)
	go func() {
		_, err := listen.TakeOver(short(t, 10*time.Second), path, second)
		res <- err
	}()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	of.expect(t, "failed: listen: it ended")
	if err := <-res; err != nil {
		t.Errorf("the second one, then: %v", err)
	}
	of.expect(t, "begin")
	if len(second.Keys()) != len(old.Keys()) || len(old.Keys()) != 7 {
		t.Errorf("%d sockets of %d", len(second.Keys()), len(old.Keys()))
	}
	of.stop()
	of.expect(t, "failed")
}

// packet sends one message with descriptors.
func packet(c *net.UnixConn, b string, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix([]byte(b), oob, nil)
	return err
}

// TestHostileSuccessors: whoever says anything else than it should gets no socket, and costs none.
func TestHostileSuccessors(t *testing.T) {
	noLeak(t)
	path := filepath.Join(t.TempDir(), "handover")
	old := newOwner(t)
	many(t, old, 1)
	of := offer(t, old, path)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	fd := int(null.Fd())
	for name, say := range map[string]func(c *net.UnixConn) error{
		"nothing":                   func(c *net.UnixConn) error { return c.CloseWrite() },
		"garbage":                   func(c *net.UnixConn) error { return packet(c, "GET / HTTP/1.1\r\n\r\n") },
		"another version":           func(c *net.UnixConn) error { return packet(c, "aeth\x02\x01") },
		"ready at once":             func(c *net.UnixConn) error { return packet(c, "aeth\x01\x04") },
		"hello with descriptors":    func(c *net.UnixConn) error { return packet(c, "aeth\x01\x01", fd, fd) },
		"hello with too many":       func(c *net.UnixConn) error { return packet(c, "aeth\x01\x01", repeat(fd, 200)...) },
		"sockets, with descriptors": func(c *net.UnixConn) error { return packet(c, "aeth\x01\x02\x01\x04mesh\x01a", fd) },
		"too long":                  func(c *net.UnixConn) error { return packet(c, "aeth\x01\x01"+strings.Repeat("x", 20<<10)) },
	} {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		if err := say(c); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		b, oob := make([]byte, 1<<12), make([]byte, 1<<12)
		for {
			n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
			if err != nil {
				break // closed
			}
			if n < 6 || b[5] != 6 || oobn != 0 {
				t.Errorf("%s: answered with % x and %d bytes of control", name, b[:n], oobn)
			}
		}
		c.Close()
	}
	select {
	case s := <-of.said:
		t.Errorf("the offer says %q", s)
	default:
	}
	// One that says hello, takes everything and then says something else.
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(packet(c, "aeth\x01\x01"), packet(c, "aeth\x01\x05")); err != nil {
		t.Error(err)
	}
	of.expect(t, "begin")
	of.expect(t, "failed: listen: gone came in place of ready")
	c.Close()
	// More callers than there is room for: none is kept for ever, and a real one gets through.
	var crowd []net.Conn
	for range 30 {
		if c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"}); err == nil {
			crowd = append(crowd, c)
		}
	}
	for _, c := range crowd {
		c.Close()
	}
	p, err := listen.TakeOver(short(t, 10*time.Second), path, newOwner(t))
	if err != nil {
		t.Fatal(err)
	}
	of.expect(t, "begin")
	p.Close()
}

func repeat(fd, n int) []int {
	fds := make([]int, n)
	for i := range fds {
		fds[i] = fd
	}
	return fds
}

// fake is a predecessor that answers each connection by its turn's function, after hello.
func fake(t *testing.T, path string, turns ...func(c *net.UnixConn)) {
	t.Helper()
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer ln.Close()
		for _, turn := range turns {
			c, err := ln.AcceptUnix()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			b := make([]byte, 100)
			if n, _ := c.Read(b); string(b[:n]) != "aeth\x01\x01" {
				t.Errorf("it says % x, want hello", b[:n])
			}
			turn(c)
			c.Close()
		}
	})
	t.Cleanup(func() { ln.Close(); wg.Wait() })
}

// TestHostilePredecessors: of a hand-over that is not as it should be nothing is kept.
func TestHostilePredecessors(t *testing.T) {
	ns := netnstest.New(t)
	source := newOwner(t)
	s := open(t, source, ns, "a")
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	const one, end1 = "aeth\x01\x02\x01\x04mesh\x01a", "aeth\x01\x03\x00\x01"
	for name, tt := range map[string]struct {
		say  func(c *net.UnixConn) error
		want string // of the error; empty: none, and one is left
	}{
		"truncated":         {func(c *net.UnixConn) error { return packet(c, one[:9], s.Mesh) }, "malformed"},
		"another version":   {func(c *net.UnixConn) error { return packet(c, "aeth\x07\x02\x01\x04mesh\x01a", s.Mesh) }, "version 7"},
		"refused":           {func(c *net.UnixConn) error { return packet(c, "aeth\x01\x06\x02no") }, "refuses the hand-over: no"},
		"fewer descriptors": {func(c *net.UnixConn) error { return packet(c, "aeth\x01\x02\x02\x04mesh\x01a\x04mesh\x01b", s.Mesh) }, "1 descriptors for 2 names"},
		"more descriptors":  {func(c *net.UnixConn) error { return packet(c, one, s.Mesh, s.Mesh) }, "2 descriptors for 1 names"},
		"far more":          {func(c *net.UnixConn) error { return packet(c, one, repeat(s.Mesh, 200)...) }, "malformed"},
		"none":              {func(c *net.UnixConn) error { return packet(c, one) }, "0 descriptors for 1 names"},
		"too long":          {func(c *net.UnixConn) error { return packet(c, one+strings.Repeat("x", 20<<10), s.Mesh) }, "malformed"},
		"out of turn":       {func(c *net.UnixConn) error { return packet(c, "aeth\x01\x05") }, "gone came in place"},
		"another total": {func(c *net.UnixConn) error {
			return errors.Join(packet(c, one, s.Mesh), packet(c, "aeth\x01\x03\x00\x02"))
		}, "1 sockets came of 2"},
		"garbage afterwards": {func(c *net.UnixConn) error { return errors.Join(packet(c, one, s.Mesh), packet(c, "x")) }, "malformed"},
		"no socket":          {func(c *net.UnixConn) error { return errors.Join(packet(c, one, int(null.Fd())), packet(c, end1)) }, ""},
		"another port":       {func(c *net.UnixConn) error { return errors.Join(packet(c, one, s.Proxy), packet(c, end1)) }, ""},
		"not transparent": {func(c *net.UnixConn) error {
			return errors.Join(packet(c, "aeth\x01\x02\x01\x07capture\x01a", s.Proxy), packet(c, end1))
		}, ""},
		"an unknown role": {func(c *net.UnixConn) error {
			return errors.Join(packet(c, "aeth\x01\x02\x01\x04quic\x01a", s.Mesh), packet(c, end1))
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			noLeak(t)
			path := filepath.Join(t.TempDir(), "handover")
			fake(t, path, func(c *net.UnixConn) {
				if err := tt.say(c); err != nil {
					t.Error(err)
				}
				io.Copy(io.Discard, c) // until the other side has gone
			})
			next := newOwner(t)
			p, err := listen.TakeOver(short(t, 10*time.Second), path, next)
			if tt.want == "" {
				if err != nil || len(p.Left) != 1 || p.Sockets != 0 {
					t.Fatalf("%+v, %v", p, err)
				}
				p.Close()
			} else if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if k := next.Keys(); len(k) != 0 {
				t.Errorf("it keeps %v", k)
			}
		})
	}
}

// TestWedgedPredecessor: one that does not answer is waited for as long as the caller says, and
// the error says what that means.
func TestWedgedPredecessor(t *testing.T) {
	noLeak(t)
	path := filepath.Join(t.TempDir(), "handover")
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ln.SetUnlinkOnClose(false)
	next := newOwner(t)
	if _, err := listen.TakeOver(short(t, 300*time.Millisecond), path, next); err == nil || !strings.Contains(err.Error(), "EADDRINUSE") {
		t.Errorf("%v", err)
	}
	ln.Close() // it is killed, and its path stays
	if _, err := listen.TakeOver(short(t, 10*time.Second), path, next); !errors.Is(err, listen.ErrNoPredecessor) {
		t.Errorf("a stale path: %v", err)
	}
	of := offer(t, next, path) // which is replaced
	of.stop()
	<-of.end
}

// TestReadyAgain: a predecessor that gave up waiting is asked anew; one that has ended needs no word.
func TestReadyAgain(t *testing.T) {
	done := func(c *net.UnixConn) { _ = packet(c, "aeth\x01\x03\x00\x00") }
	confirms := func(c *net.UnixConn) {
		done(c)
		b := make([]byte, 100)
		if n, _ := c.Read(b); string(b[:n]) != "aeth\x01\x04" {
			t.Errorf("it says % x, want ready", b[:n])
		}
		_ = packet(c, "aeth\x01\x05")
	}
	for name, turns := range map[string][]func(*net.UnixConn){
		"gave up once": {done, confirms},
		"has ended":    {done},
	} {
		t.Run(name, func(t *testing.T) {
			noLeak(t)
			path := filepath.Join(t.TempDir(), "handover")
			fake(t, path, turns...)
			p, err := listen.TakeOver(short(t, 10*time.Second), path, newOwner(t))
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Ready(short(t, 10*time.Second)); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("gives up again and again", func(t *testing.T) {
		noLeak(t)
		path := filepath.Join(t.TempDir(), "handover")
		fake(t, path, done, done, done, done)
		p, err := listen.TakeOver(short(t, 10*time.Second), path, newOwner(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Ready(short(t, 10*time.Second)); err == nil {
			t.Error("a predecessor that never confirms is taken for gone")
		}
	})
}

// TestAdminListener: the admin's address is handed over; another address is opened anew.
func TestAdminListener(t *testing.T) {
	noLeak(t)
	path := filepath.Join(t.TempDir(), "handover")
	old := newOwner(t)
	ln, err := old.Admin("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	of := offer(t, old, path)
	next := newOwner(t)
	p, err := listen.TakeOver(short(t, 10*time.Second), path, next)
	if err != nil {
		t.Fatal(err)
	}
	of.expect(t, "begin")
	mine, err := next.Admin(addr)
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if err := p.Ready(short(t, 10*time.Second)); err != nil {
		t.Error(err)
	}
	of.expect(t, "taken")
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "next") })}
	done := make(chan struct{})
	go func() { defer close(done); srv.Serve(mine) }()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	res, err := c.Get("http://" + addr)
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(res.Body); string(b) != "next" {
		t.Errorf("%q", b)
	}
	res.Body.Close()
	srv.Close()
	<-done
	other, err := next.Admin("127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(other.Addr().String(), "127.0.0.2:") {
		t.Errorf("it listens on %s", other.Addr())
	}
	other.Close()
	if _, err := newOwner(t).Admin("nowhere:x:y"); err == nil {
		t.Error("listens nowhere")
	}
}
