package http2

import (
	"testing"
	"unsafe"

	"aether/dataplane/hpack"
	"aether/dataplane/httpmsg"
)

// TestSizes: what Held counts for an object is what it takes.
func TestSizes(t *testing.T) {
	for _, tt := range []struct {
		what       string
		count, has uintptr
	}{
		{"field", fieldSize, unsafe.Sizeof(hpack.Field{})},
		{"head field", headSize, unsafe.Sizeof(httpmsg.Field{})},
		{"slot", slotSize, unsafe.Sizeof(slot{})},
		{"stream", streamSize, unsafe.Sizeof(Stream{})},
	} {
		if tt.count < tt.has || tt.count > tt.has+16 { // a size class more
			t.Errorf("a %s counts %d bytes and has %d", tt.what, tt.count, tt.has)
		}
	}
}
