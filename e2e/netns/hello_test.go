package netns

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"aether/e2e/rig"
)

// extension of a ClientHello.
type extension struct {
	kind uint16
	data []byte
}

// sni is the extension server_name (RFC 6066 section 3) with that name, whatever it is.
func sni(name string) extension {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(name)+3))
	b = append(b, 0) // host_name
	b = binary.BigEndian.AppendUint16(b, uint16(len(name)))
	return extension{0, append(b, name...)}
}

// clientHello is a record with a ClientHello (RFC 8446 section 4.1.2) of those extensions, written by hand so that
// it may be one that no library writes.
func clientHello(extensions ...extension) []byte {
	var ext []byte
	for _, e := range extensions {
		ext = binary.BigEndian.AppendUint16(ext, e.kind)
		ext = binary.BigEndian.AppendUint16(ext, uint16(len(e.data)))
		ext = append(ext, e.data...)
	}
	b := []byte{3, 3}
	b = append(b, make([]byte, 32)...)                // random
	b = append(b, 0)                                  // no session
	b = append(b, 0, 6, 0x0a, 0x0a, 0x13, 1, 0x13, 2) // ciphers, one of RFC 8701
	b = append(b, 1, 0)                               // no compression
	b = binary.BigEndian.AppendUint16(b, uint16(len(ext)))
	b = append(b, ext...)
	b = append([]byte{1, byte(len(b) >> 16), byte(len(b) >> 8), byte(len(b))}, b...)
	return record(22, b)
}

// record is one TLS record.
func record(kind byte, b []byte) []byte {
	return append([]byte{kind, 3, 1, byte(len(b) >> 8), byte(len(b))}, b...)
}

// acked returns when the other end's kernel has all that was written: what is written next comes in a segment,
// and mostly in a read, of its own.
func acked(t *testing.T, ctx context.Context, c *net.TCPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = rig.Until(ctx, func(context.Context) error {
		left, err := 0, error(nil)
		if e := raw.Control(func(fd uintptr) { left, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }); e != nil {
			return e
		}
		if err == nil && left > 0 {
			err = fmt.Errorf("%d bytes are on their way", left)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
