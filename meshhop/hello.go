package meshhop

import "encoding/binary"

// HelloNeeds returns how many bytes a connection must have brought before more can be
// said of its ClientHello (RFC 8446 4.1.2), of which b is what has come. 0: it is
// whole, or b is the beginning of none, and a handshake would not wait for the peer.
func HelloNeeds(b []byte) int {
	const (
		handshake   = 22 // ContentType (RFC 8446 5.1)
		clientHello = 1  // HandshakeType (4)
		msgHeader   = 4
	)
	var header [msgHeader]byte
	got := 0 // bytes of the message, which may lie in several records
	for off := 0; ; {
		if len(b) > off && b[off] != handshake {
			return 0
		}
		if len(b) < off+5 {
			return off + 5
		}
		n := int(binary.BigEndian.Uint16(b[off+3:]))
		if n == 0 || n > 1<<14 {
			return 0
		}
		off += 5
		part := b[off:min(len(b), off+n)]
		if got < msgHeader {
			copy(header[got:], part)
		}
		got += len(part)
		if got > 0 && header[0] != clientHello {
			return 0
		}
		if off += n; len(b) < off {
			return off
		}
		if got >= msgHeader && got >= msgHeader+int(header[1])<<16+int(binary.BigEndian.Uint16(header[2:])) {
			return 0
		}
	}
}
