package meshhop

import (
	"slices"
	"testing"
)

// TestHelloNeeds: of every beginning of a ClientHello more is needed, and never more than there is of it; of the
// whole, and of what is none, nothing.
func TestHelloNeeds(t *testing.T) {
	message := func(kind byte, n int) []byte {
		return append([]byte{kind, byte(n >> 16), byte(n >> 8), byte(n)}, make([]byte, n)...)
	}
	records := func(b []byte, size int) (out []byte) {
		for part := range slices.Chunk(b, size) {
			out = append(append(out, 22, 3, 1, byte(len(part)>>8), byte(len(part))), part...)
		}
		return out
	}
	for _, n := range []int{0, 1, 300, 1700, 16380, 40000} {
		for _, size := range []int{1, 2, 3, 4, 5, 1000, 1 << 14} {
			whole := records(message(1, n), size)
			if got := HelloNeeds(append(slices.Clone(whole), "behind"...)); got != 0 {
				t.Fatalf("%d bytes in records of %d: the whole needs %d", n, size, got)
			}
			for i := 0; i < len(whole); i += 1 + i/50 {
				if got := HelloNeeds(whole[:i]); got <= i || got > len(whole) {
					t.Fatalf("%d bytes in records of %d: %d of %d need %d", n, size, i, len(whole), got)
				}
			}
		}
	}
	for name, b := range map[string][]byte{
		"no TLS":              []byte("GET / HTTP/1.1\r\n"),
		"an alert":            {21, 3, 3, 0, 2, 1, 0},
		"another message":     records(message(2, 100), 1000)[:20],
		"an empty record":     {22, 3, 1, 0, 0},
		"too long a record":   {22, 3, 1, 0x40, 1},
		"then another record": append(records(message(1, 1000), 500)[:505], 23),
	} {
		if got := HelloNeeds(b); got != 0 {
			t.Errorf("%s: needs %d", name, got)
		}
	}
}

func FuzzHelloNeeds(f *testing.F) {
	f.Add([]byte{22, 3, 1, 0, 4, 1, 0, 0, 0})
	f.Add([]byte{22, 3, 1, 0, 1, 1, 22, 3, 1, 0, 3, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if n := HelloNeeds(b); n != 0 && n <= len(b) {
			t.Errorf("of %d bytes %d are needed: they are there", len(b), n)
		}
	})
}
