package hpack

import (
	"strings"
	"testing"
)

// TestDefaultLimit: a Decoder that names no limit has Envoy's 60 KiB, counted as SETTINGS_MAX_HEADER_LIST_SIZE is.
func TestDefaultLimit(t *testing.T) {
	for n, want := range map[int]error{61440: nil, 61441: ErrTooLarge, 16 * 61440: ErrTooLarge, 16*61440 + 1: ErrBomb} {
		block := appendLiteral(nil, 0, 4, 0, []byte("n"), make([]byte, n-1-32))
		if f, err := NewDecoder(0, nil).Decode(block, nil); err != want || (err == nil) != (len(f) == 1) {
			t.Errorf("a field of %d octets: %d fields, %v, want %v", n, len(f), err, want)
		}
	}
}

// TestIntegersAreBounded: longer than any length or index can be is no integer, whatever way it is written.
func TestIntegersAreBounded(t *testing.T) {
	for v, want := range map[int]bool{1 << 24: true, 1<<24 + 1: false} {
		if got, rest, ok := readInt(append(appendInt(nil, 0, 7, v), 1), 7); ok != want || ok && (got != v || len(rest) != 1) {
			t.Errorf("%d is read as %d, %v", v, got, ok)
		}
	}
	if _, _, ok := readInt([]byte{0x7f, 0x80, 0x80, 0x80, 0x80, 0x00}, 7); ok {
		t.Error("an integer of six octets is read")
	}
}

// TestLargeFieldsTakeNoPlace: a field of more than a quarter of the table is sent without a place in it, however often it
// comes.
func TestLargeFieldsTakeNoPlace(t *testing.T) {
	for n, want := range map[int]bool{1024: true, 1025: false} {
		e, value := NewEncoder(), []byte(strings.Repeat("v", n-32-len("name")))
		first := len(e.Field(e.Begin(nil), []byte("name"), value))
		for range 2 { // seen once, then in the table
			_ = e.Field(e.Begin(nil), []byte("name"), value)
		}
		if again := len(e.Field(e.Begin(nil), []byte("name"), value)); (again < first) != want {
			t.Errorf("a field of %d octets takes %d on the wire, and %d the fourth time", n, first, again)
		}
	}
}
