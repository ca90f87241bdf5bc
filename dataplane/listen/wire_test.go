package listen

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func messages() []message {
	full := message{kind: sockets}
	for i := range maxBatch {
		full.names = append(full.names, named{strings.Repeat("r", maxRole), strings.Repeat("c", maxContainer-2) + fmt.Sprintf("%02d", i)})
	}
	return []message{
		{kind: hello}, {kind: ready}, {kind: gone},
		{kind: sockets, names: []named{{"capture", "a"}, {"admin", ""}}}, full,
		{kind: end}, {kind: end, total: maxSockets},
		{kind: refused, reason: busy}, {kind: refused, reason: strings.Repeat("x", maxReason)},
	}
}

func TestMessages(t *testing.T) {
	for _, m := range messages() {
		b := m.append(nil)
		if got, err := parse(b); err != nil || !reflect.DeepEqual(got, m) || len(b) > maxMessage {
			t.Errorf("%s in %d bytes reads as %+v, %v", m.kind, len(b), got, err)
		}
		for i := range b { // every beginning is no message, and what is longer is none
			if _, err := parse(b[:i]); err == nil {
				t.Errorf("%s: %d bytes of %d are a message", m.kind, i, len(b))
			}
		}
		if _, err := parse(append(b, 0)); err == nil {
			t.Errorf("%s with a byte behind it is a message", m.kind)
		}
	}
	for name, b := range map[string]string{
		"another version":    "aeth\x02\x01",
		"another magic":      "Aeth\x01\x01",
		"kind 0":             "aeth\x01\x00",
		"kind 7":             "aeth\x01\x07",
		"no socket":          "aeth\x01\x02\x00",
		"too many sockets":   "aeth\x01\x02\x41" + strings.Repeat("\x01a\x01b", 65),
		"a long role":        "aeth\x01\x02\x01\x11" + strings.Repeat("r", 17) + "\x01c",
		"a long container":   "aeth\x01\x02\x01\x01r\x81" + strings.Repeat("c", 129),
		"a total too large":  "aeth\x01\x03\x40\x01",
		"a length too large": "aeth\x01\x02\x01\x05mesh",
	} {
		if m, err := parse([]byte(b)); err == nil {
			t.Errorf("%s: read as %+v", name, m)
		}
	}
	if _, err := parse([]byte("aeth\x02\x01")); err == nil || !strings.Contains(err.Error(), "version 2") || !strings.Contains(err.Error(), "SIGTERM") {
		t.Errorf("another version: %v", err)
	}
}

// FuzzParse: what is read is within the bounds and is written as it was.
func FuzzParse(f *testing.F) {
	for _, m := range messages() {
		f.Add(m.append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		m, err := parse(b)
		if !bytes.Equal(b, before) {
			t.Fatal("the parser wrote to its input")
		}
		if err != nil {
			return
		}
		if len(m.names) > maxBatch || m.total > maxSockets || len(m.reason) > maxReason {
			t.Fatalf("beyond the bounds: %+v", m)
		}
		if again := m.append(nil); !bytes.Equal(again, b) {
			t.Fatalf("% x reads as %+v, which is written % x", b, m, again)
		}
	})
}

func TestOtherUsers(t *testing.T) {
	for _, tt := range []struct {
		peer uint32
		user int
		ok   bool
	}{{0, 0, true}, {1000, 1000, true}, {1000, 0, false}, {0, 1000, false}, {65534, 1000, false}} {
		if err := allowed(&unix.Ucred{Pid: 7, Uid: tt.peer}, tt.user); (err == nil) != tt.ok {
			t.Errorf("a process of user %d, ours is %d: %v", tt.peer, tt.user, err)
		}
	}
}
