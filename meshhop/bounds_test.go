package meshhop

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"aether/mtls/record"
)

// TestHandshakesAreBounded: unless a configuration says otherwise, a pod has 64 handshakes at once and the node 256; 1,024
// wait, a quarter of them one pod's, and all others fail at once.
func TestHandshakesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(LimiterConfig{})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		for i, want := range []struct{ in, wait int32 }{{64, 256}, {64, 256}, {64, 256}, {64, 256}, {0, 0}} {
			const tries = 400
			var in, full atomic.Int32
			for range tries {
				wg.Go(func() {
					leave, err := l.Enter(ctx, fmt.Sprint(i))
					switch {
					case err == nil:
						in.Add(1)
						<-ctx.Done()
						leave()
					case isBusy(err, true):
						full.Add(1)
					case !isBusy(err, false):
						t.Error(err)
					}
				})
			}
			synctest.Wait()
			if got := tries - in.Load() - full.Load(); in.Load() != want.in || got != want.wait {
				t.Errorf("pod %d: %d handshakes and %d that wait, want %+v", i, in.Load(), got, want)
			}
		}
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
			_, err := d.Meet(ctx, r.key(H2), r.local)
			return err
		}, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				full := NewLimiter(LimiterConfig{Node: 1})
				leave, err := full.Enter(t.Context(), "another")
				if err != nil {
					t.Fatal(err)
				}
				defer leave()
				start := time.Now()
				err = tt.run(t.Context(), full)
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
