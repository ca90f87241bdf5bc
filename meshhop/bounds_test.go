package meshhop

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"aether/mtls/record"
)

// TestHandshakesAreBounded: unless a configuration says otherwise, a pod has 128 handshakes at once and the node 512, each
// pod eight whatever the others have; 1,024 wait, a quarter of them one pod's, and all others fail at once.
func TestHandshakesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(LimiterConfig{})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		type pod struct{ in, full atomic.Int32 }
		var pods []*pod
		const tries = 500
		for i := range 5 {
			p := &pod{}
			pods = append(pods, p)
			for range tries {
				wg.Go(func() {
					turn, err := l.Enter(ctx, fmt.Sprint(i), netip.Addr{})
					switch {
					case err == nil:
						p.in.Add(1)
						<-ctx.Done()
						turn.Leave()
					case isBusy(err, true):
						p.full.Add(1)
					case !isBusy(err, false):
						t.Error(err)
					}
				})
			}
			synctest.Wait()
		}
		waiting := int32(0)
		for i, p := range pods {
			want := int32(128)
			if i == 4 {
				want = 8
			}
			wait := tries - p.in.Load() - p.full.Load()
			if p.in.Load() != want || wait > 256 || wait < 200 {
				t.Errorf("pod %d: %d handshakes and %d that wait, want %d and a quarter of the queue, or a fifth", i, p.in.Load(), wait, want)
			}
			waiting += wait
		}
		if waiting != 1024 {
			t.Errorf("%d wait, want 1024", waiting)
		}
	})
}

// TestSilentPeerLosesItsTurn: a peer that is waited for keeps its turn until somebody else waits for it, and a second; then
// the oldest of who has most loses it.
func TestSilentPeerLosesItsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(LimiterConfig{Node: 4, Pod: 4, Queue: 8})
		const few, much = "10.0.0.1", "10.0.0.2"
		var turns []*Turn
		for i, from := range []string{few, much, much, much} {
			turn, err := l.Enter(t.Context(), "a", netip.MustParseAddr(from))
			if err != nil {
				t.Fatal(err)
			}
			defer turn.Leave()
			ours, theirs := net.Pipe()
			defer theirs.Close()
			defer ours.Close()
			turns = append(turns, turn)
			if i == 1 {
				continue // it works, and is waited for by nobody
			}
			done := make(chan error, 1)
			go func() {
				_, err := turn.wrap(ours).Read(make([]byte, 1))
				done <- err
			}()
			synctest.Wait()
			if i == 2 { // the oldest of who has most
				defer func() {
					if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
						t.Errorf("its read: %v", err)
					}
				}()
			}
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(time.Hour)
		for i, turn := range turns {
			if turn.wasLost() {
				t.Errorf("nobody waits, and %d lost its turn", i)
			}
		}
		start := time.Now()
		turn, err := l.Enter(t.Context(), "a", netip.MustParseAddr(few))
		if err != nil {
			t.Fatal(err)
		}
		defer turn.Leave()
		if took := time.Since(start); took != 0 {
			t.Errorf("it waited %v, and others were silent for an hour", took)
		}
		for i, want := range []bool{false, false, true, false} {
			if turns[i].wasLost() != want {
				t.Errorf("turn %d lost: %v", i, !want)
			}
		}
	})
}

// lateConn is a connection whose bytes come at the moment that meanwhile ends.
type lateConn struct {
	net.Conn
	meanwhile func()
}

func (c *lateConn) Read(b []byte) (int, error)      { c.meanwhile(); return len(b), nil }
func (c *lateConn) SetReadDeadline(time.Time) error { return nil }

// TestLostTurnEndsItsHandshake: a turn that is lost while the peer's bytes come ends its handshake all the same.
func TestLostTurnEndsItsHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(LimiterConfig{Node: 1, Pod: 1, Queue: 8})
		first, err := l.Enter(t.Context(), "a", netip.MustParseAddr("10.0.0.1"))
		if err != nil {
			t.Fatal(err)
		}
		defer first.Leave()
		var next *Turn
		_, err = first.wrap(&lateConn{meanwhile: func() { next, err = l.Enter(t.Context(), "a", netip.MustParseAddr("10.0.0.2")) }}).Read(make([]byte, 1))
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a read of a handshake that has lost its turn: %v", err)
		}
		if next == nil || !first.wasLost() {
			t.Fatalf("the turn was not given to who waits: %v", next)
		}
		next.Leave()
	})
}

// TestTimesAreBounded: unless a configuration says otherwise, a connect has two seconds (contract 5.1), and a handshake,
// with the wait for its turn, five.
func TestTimesAreBounded(t *testing.T) {
	r := newRig(t, record.Std, 0)
	for name, tt := range map[string]struct {
		run  func(ctx context.Context, full *Limiter) error
		want time.Duration
	}{
		"connect": {func(ctx context.Context, _ *Limiter) error {
			d := Dialer{SVID: r.dialer.SVID, Sockets: func(ctx context.Context, _ string, _ netip.AddrPort) (*net.TCPConn, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}}
			_, err := d.Dial(ctx, r.key(H2))
			return err
		}, 2 * time.Second},
		"dial": {func(ctx context.Context, full *Limiter) error {
			d := Dialer{SVID: r.dialer.SVID, Limit: full, Sockets: func(context.Context, string, netip.AddrPort) (*net.TCPConn, error) {
				return &net.TCPConn{}, nil
			}}
			_, err := d.Dial(ctx, r.key(H2))
			return err
		}, 5 * time.Second},
		"accept": {func(ctx context.Context, full *Limiter) error {
			_, err := (&Acceptor{Limit: full}).Accept(ctx, r.local, &net.TCPConn{})
			return err
		}, 5 * time.Second},
		"meet": {func(ctx context.Context, full *Limiter) error {
			d := Dialer{SVID: r.dialer.SVID, Limit: full}
			_, err := d.VerifyLocal(ctx, r.key(H2), r.local)
			return err
		}, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				full := NewLimiter(LimiterConfig{Pod: 1})
				for _, pod := range []string{"web-1", "cart-1"} {
					turn, err := full.Enter(t.Context(), pod, netip.Addr{})
					if err != nil {
						t.Fatal(err)
					}
					defer turn.Leave()
				}
				start := time.Now()
				err := tt.run(t.Context(), full)
				if took := time.Since(start); err == nil || took != tt.want {
					t.Errorf("%v after %v, want %v", err, took, tt.want)
				}
			})
		})
	}
}

// talker is a refused caller that sends without end.
type talker struct {
	read   int
	until  time.Time
	closed bool
}

func (c *talker) Read(p []byte) (int, error)        { c.read += len(p); return len(p), nil }
func (c *talker) Close() error                      { c.closed = true; return nil }
func (c *talker) CloseWrite() error                 { return nil }
func (c *talker) SetReadDeadline(t time.Time) error { c.until = t; return nil }

// TestRefusedIsNotHeard: a refused caller that goes on sending, or does not close, is closed.
func TestRefusedIsNotHeard(t *testing.T) {
	const wait = 250 * time.Millisecond
	c := &talker{}
	start := time.Now()
	closeAfterAlert(c, ReasonUnknownSNI)
	if least, most := start.Add(wait), time.Now().Add(wait); c.until.Before(least) || c.until.After(most) {
		t.Errorf("it has %v", c.until.Sub(start))
	}
	if c.read != 64<<10 || !c.closed {
		t.Errorf("%d bytes are read, closed %v", c.read, c.closed)
	}
}
