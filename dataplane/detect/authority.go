package detect

import (
	"aether/dataplane/hpack"
	"aether/sniff"
)

// authority finds the authority of the first request of an HTTP/2 client. It is needed only
// for h2c to an address that is not the mesh's. Between calls the bytes may only grow: each frame is
// gone through once. The zero value is ready.
type authority struct {
	at   int // of the frame that is looked at next; 0: behind the preface
	head int // of the first HEADERS frame, if that goes on in further ones; 0: none
}

// Of frames (RFC 9113 sections 4.1 and 6).
const (
	frameHeader       = 9
	frameMost         = 16 << 10 // bytes of a frame's payload that a server has not allowed more for
	frameHeaders      = 1
	frameContinuation = 9
	flagEndHeaders    = 4
	flagPadded        = 8
	flagPriority      = 32
)

// find reads b, which begins with the preface. more: the first field block is not whole yet. The authority is
// as it was sent: the codec that serves the request judges it. "": there is none, or the frames are none of HTTP/2.
func (f *authority) find(b []byte) (host string, more bool) {
	if f.at == 0 {
		f.at = len(sniff.Preface)
	}
	for {
		if len(b)-f.at < frameHeader {
			return "", true
		}
		h := b[f.at:]
		n, kind, flags := int(h[0])<<16|int(h[1])<<8|int(h[2]), h[3], h[4]
		if n > frameMost || (kind == frameContinuation) != (f.head > 0) {
			return "", false
		}
		if len(h) < frameHeader+n {
			return "", true
		}
		if kind == frameHeaders || kind == frameContinuation {
			if f.head == 0 {
				f.head = f.at
			}
			if flags&flagEndHeaders != 0 {
				return authorityOf(b[f.head : f.at+frameHeader+n]), false
			}
		}
		f.at += frameHeader + n
	}
}

// authorityOf decodes the block of a HEADERS frame and its CONTINUATION frames, which are whole.
func authorityOf(frames []byte) (host string) {
	var block []byte
	for first := true; len(frames) > 0; first = false {
		n, flags := int(frames[0])<<16|int(frames[1])<<8|int(frames[2]), frames[4]
		p := frames[frameHeader : frameHeader+n]
		frames = frames[frameHeader+n:]
		if first {
			pad, skip := 0, 0
			if flags&flagPadded != 0 {
				if len(p) == 0 {
					return ""
				}
				pad, skip = int(p[0]), 1
			}
			if flags&flagPriority != 0 {
				skip += 5
			}
			if skip+pad > len(p) {
				return ""
			}
			p = p[skip : len(p)-pad]
		}
		block = append(block, p...)
	}
	fields, err := hpack.NewDecoder(0, nil).Decode(block, nil)
	if err != nil {
		return ""
	}
	for _, f := range fields {
		switch string(f.Name) {
		case ":authority":
			return string(f.Value)
		case "host":
			host = string(f.Value)
		}
	}
	return host
}
