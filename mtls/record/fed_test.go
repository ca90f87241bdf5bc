package record

import (
	"bytes"
	mrand "math/rand/v2"
	"testing"
)

// TestFedBytesAreTheCallersAgain: after Feed(nil) nothing of what was fed is borrowed, wherever reading stopped: the caller may
// write over it, and what is read afterwards is what was sent.
func TestFedBytesAreTheCallersAgain(t *testing.T) {
	each(t, func(t *testing.T, cm, sm Maker) {
		for _, size := range []int{1, 100, MaxPlain} {
			for _, stop := range []int{0, 1, size / 2, size, size + 1} {
				c, s := pair(t, cm, sm, nil)
				want := random(mrand.New(mrand.NewPCG(1, 2)), 3*size)
				var sealed []byte
				for i := range 3 {
					var err error
					if sealed, err = c.Seal(sealed, want[i*size:][:size]); err != nil {
						t.Fatal(err)
					}
				}
				s.Feed(sealed)
				var got []byte
				p := make([]byte, 7)
				for len(got) < min(stop, len(want)) {
					n, err := s.Read(p[:min(len(p), stop-len(got))])
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, p[:n]...)
				}
				s.Feed(nil)
				clear(sealed)
				rest, err := drain(s, make([]byte, 1000))
				if err != ErrMore {
					t.Fatalf("%d bytes a record, stopped after %d: %v", size, stop, err)
				}
				if got = append(got, rest...); !bytes.Equal(got, want) {
					t.Errorf("%d bytes a record, stopped after %d: what was read is not what was sent", size, stop)
				}
			}
		}
	})
}
