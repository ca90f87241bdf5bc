package relay

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"aether/mtls/record"
)

// account is a Memory.
type account struct {
	held, most atomic.Int64
	full       atomic.Bool
}

func (a *account) HoldBytes(n int) {
	if v := a.held.Add(int64(n)); v > a.most.Load() {
		a.most.Store(v)
	}
}
func (a *account) Roomy() bool { return !a.full.Load() }

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// TestWhatARelayHoldsIsCounted: the buffers of directions whose reader takes nothing, what was read before the relay began, and
// the part of a record that has come are in the account while they are held, and not after. An account without room for large
// buffers keeps directions at the smallest.
func TestWhatARelayHoldsIsCounted(t *testing.T) {
	for _, kind := range []string{"plain", "tls std", "tls own"} {
		for _, full := range []bool{false, true} {
			t.Run(kind+map[bool]string{true: ", no room"}[full], func(t *testing.T) {
				var m account
				m.full.Store(full)
				b := newBedWith(t, kind, make([]byte, 12_345), Options{Memory: &m})
				fill := func() { // until nothing goes any more
					buf := make([]byte, 256<<10)
					for {
						b.client.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
						if _, err := b.client.Write(buf); err != nil {
							return
						}
					}
				}
				if fill(); kind == "plain" {
					// The kernel holds what is spliced: what was read first is all that can be held of ours.
					if n := m.held.Load(); n != 0 && n != slotLen {
						t.Errorf("%d bytes are accounted", n)
					}
				} else {
					inUse := int64(0)
					for _, s := range sizes {
						inUse += s.inUse.Load() * int64(s.slots) * slotLen
					}
					if n := m.held.Load(); n < slotLen || n > inUse+2*record.MaxRecord {
						t.Errorf("%d bytes are accounted, buffers in use have %d", n, inUse)
					}
				}
				if n := m.most.Load(); full && n > 2*slotLen+12_345+2*record.MaxRecord {
					t.Errorf("up to %d bytes are held, though there is no room", n)
				}
				b.cancel()
				b.result(t)
				until(t, "nothing is accounted", func() bool { return m.held.Load() == 0 })
			})
		}
	}
}

// TestPartOfARecordIsCounted: a hop that begins a record and does not end it.
func TestPartOfARecordIsCounted(t *testing.T) {
	for _, kind := range []string{"tls std", "tls own"} {
		t.Run(kind, func(t *testing.T) {
			var m account
			b := newBedWith(t, kind, nil, Options{Memory: &m})
			if _, err := b.server.tcp.Write(append([]byte{23, 3, 3, 0x40, 0x11}, make([]byte, 100)...)); err != nil {
				t.Fatal(err)
			}
			until(t, "the record is accounted", func() bool { return m.held.Load() >= record.MaxPlain })
			b.cancel()
			b.result(t)
			until(t, "nothing is accounted", func() bool { return m.held.Load() == 0 })
		})
	}
}

// TestAccountAllocatesNothing: what is moved with an account costs no allocation.
func TestAccountAllocatesNothing(t *testing.T) {
	var m account
	var w permit
	if n := testing.AllocsPerRun(1000, func() { take(0, &w, &m).put() }); n > 0.1 { // a collection may empty the pool
		t.Errorf("%.2f allocations a buffer", n)
	}
	if m.held.Load() != 0 {
		t.Error("something is left in the account")
	}
}
