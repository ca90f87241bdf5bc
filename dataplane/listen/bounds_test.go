package listen

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hurried is an end of a line on which one of the deadlines is over as soon as it is set.
type hurried struct {
	*net.UnixConn
	reads, writes int           // so many deadlines are kept before
	had           time.Duration // that the one had
}

var longAgo = time.Unix(1, 0)

func (h *hurried) deadline(left *int, at time.Time, set func(time.Time) error) error {
	if *left--; *left == -1 {
		h.had = time.Until(at)
		at = longAgo
	}
	return set(at)
}

func (h *hurried) SetReadDeadline(at time.Time) error {
	return h.deadline(&h.reads, at, h.UnixConn.SetReadDeadline)
}

func (h *hurried) SetWriteDeadline(at time.Time) error {
	return h.deadline(&h.writes, at, h.UnixConn.SetWriteDeadline)
}

// unixPair is two ends of a line.
func unixPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "line")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

const never = 1 << 20 // deadlines

// TestTimesOfAHandOver: each wait for the other process is bounded, and when it is over all is as before.
func TestTimesOfAHandOver(t *testing.T) {
	timeout := func(t *testing.T, err error) {
		t.Helper()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("it fails for %v", err)
		}
	}
	offered := func(say string, failed bool) func(*testing.T, *hurried, *net.UnixConn) {
		return func(t *testing.T, h *hurried, peer *net.UnixConn) {
			if say != "" {
				if _, err := peer.Write([]byte(say)); err != nil {
					t.Fatal(err)
				}
			}
			var began int
			var why error
			f := &Offer{o: OfferConfig{Owner: &Owner{}, Begin: func() { began++ }, Failed: func(err error) { why = err }, Taken: func() { t.Error("taken") }}}
			if f.serve(&line{c: h}) {
				t.Error("handed over")
			}
			if !failed {
				if began != 0 || why != nil {
					t.Errorf("begun %d times, %v", began, why)
				}
				return
			}
			timeout(t, why)
			if began != 1 || !f.one.TryLock() {
				t.Errorf("begun %d times, or the turn is not given back", began)
			}
		}
	}
	const hello = "aeth\x01\x01"
	for _, tt := range []struct {
		name          string
		reads, writes int
		run           func(*testing.T, *hurried, *net.UnixConn)
		want          time.Duration
	}{
		{"a successor that says nothing", 0, never, offered("", false), 5 * time.Second},
		{"a successor that takes nothing", never, 0, offered(hello, true), 10 * time.Second},
		{"a successor that does not accept", 1, never, offered(hello, true), 2 * time.Minute}, // contract 13.5
		{"a predecessor that sends nothing", 0, never, func(t *testing.T, h *hurried, _ *net.UnixConn) {
			p, err := take(t.Context(), "x", h, &Owner{})
			if timeout(t, err); p != nil {
				t.Error("taken over")
			}
		}, 10 * time.Second},
		{"a predecessor that takes nothing", never, 0, func(t *testing.T, h *hurried, _ *net.UnixConn) {
			_, err := take(t.Context(), "x", h, &Owner{})
			timeout(t, err)
		}, 10 * time.Second},
		{"a predecessor that does not confirm", 0, never, func(t *testing.T, h *hurried, _ *net.UnixConn) {
			err := (&Predecessor{path: "x", l: line{c: h}}).ready(t.Context())
			if timeout(t, err); err != nil && !strings.Contains(err.Error(), "does not confirm") {
				t.Error(err)
			}
		}, 10 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mine, peer := unixPair(t)
			h := &hurried{UnixConn: mine, reads: tt.reads, writes: tt.writes}
			start := time.Now()
			tt.run(t, h, peer)
			if spent := time.Since(start); h.had > tt.want || h.had < tt.want-spent {
				t.Errorf("it is waited %v for, want %v", h.had, tt.want)
			}
		})
	}
}

// TestCallersAreBounded: of those who connect and say nothing eight are waited for; the others find the line closed.
func TestCallersAreBounded(t *testing.T) {
	for range 3 { // a machine may stand still for as long as a caller is waited for
		if closedAtOnce(t) {
			return
		}
	}
	t.Error("more than eight are waited for")
}

// closedAtOnce reports whether the callers beyond the eighth were closed before any caller's time was over.
func closedAtOnce(t *testing.T) bool {
	path := filepath.Join(t.TempDir(), "handover")
	f, err := NewOffer(path, OfferConfig{Owner: &Owner{}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer func() { cancel(); wg.Wait() }()
	wg.Go(func() { f.Serve(ctx) })
	start := time.Now()
	inTime := func() bool { return time.Since(start) < 5*time.Second }
	var callers []*net.UnixConn
	for range 30 { // they are accepted in order
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		callers = append(callers, c)
	}
	for i, c := range callers[8:] {
		_ = c.SetReadDeadline(start.Add(time.Minute))
		if n, err := c.Read(make([]byte, 100)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("caller %d: %d bytes, %v", 9+i, n, err)
		}
	}
	atOnce := inTime()
	for i, c := range callers[:8] {
		rc, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var still error
		if err := rc.Control(func(fd uintptr) { _, _, still = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_DONTWAIT) }); err != nil {
			t.Fatal(err)
		}
		if still != unix.EAGAIN && inTime() {
			t.Errorf("caller %d is not waited for: %v", 1+i, still)
		}
	}
	return atOnce
}
