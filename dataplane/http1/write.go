package http1

import (
	"strconv"

	"aether/dataplane/httpmsg"
)

// ResponseOptions say what a response head tells its receiver about the
// connection.
type ResponseOptions struct {
	Close       bool  // the connection ends after this response; implied by ToClose
	KeepAlive10 bool  // the client speaks HTTP/1.0, asked for keep-alive and gets it
	Head        bool  // answers HEAD: a content-length in Fields is kept, there is no body
	Minor       uint8 // HTTP/1 minor version of the request, which the response repeats
}

// AppendRequest appends the head of h as an HTTP/1.1 request framed by f (as a
// rule RequestFraming's) and returns the longer dst. The target is h.Path, in
// origin-form or "*"; empty means "/". Host is h.Authority, even when empty.
// With Length the body must have h.Length bytes. Fields about framing and the
// connection that stand in h.Fields are not written but made anew: te as
// "te: trailers", h.Upgrade as an upgrade. Names and values must be valid
// (httpmsg.Lower, httpmsg.ValidValue); they are not checked again.
func AppendRequest(dst []byte, h *httpmsg.Head, f Framing) []byte {
	dst = append(dst, h.Method...)
	dst = append(dst, ' ')
	if len(h.Path) == 0 {
		dst = append(dst, '/')
	}
	dst = append(dst, h.Path...)
	spelled := h.Upgrade != nil
	if spelled {
		dst = append(dst, " HTTP/1.1\r\nHost: "...)
	} else {
		dst = append(dst, " HTTP/1.1\r\nhost: "...)
	}
	dst = append(dst, h.Authority...)
	dst = append(dst, "\r\n"...)
	te := false
	for i := range h.Fields {
		fd := &h.Fields[i]
		switch classify(fd.Name) {
		case endToEnd:
			dst = appendSpelled(dst, fd, spelled)
		case teField:
			te = true
		}
	}
	dst = appendFraming(dst, f, h.Length)
	switch {
	case te && h.Upgrade != nil:
		dst = append(dst, "te: trailers\r\nConnection: te, Upgrade\r\n"...)
	case te:
		dst = append(dst, "te: trailers\r\nconnection: te\r\n"...)
	case h.Upgrade != nil:
		dst = append(dst, "Connection: Upgrade\r\n"...)
	}
	return append(appendUpgrade(dst, h.Upgrade), "\r\n"...)
}

// AppendResponse appends the head of h as a response framed by f (as a rule
// ResponseFraming's) and returns the longer dst. The reason phrase is the
// standard one, or empty. 1xx and 204 carry no framing, and 304 and answers to
// HEAD at most the content-length in h.Fields, whatever f says. Any other
// response says where it ends: None there means "content-length: 0".
// Everything else is as for AppendRequest.
func AppendResponse(dst []byte, h *httpmsg.Head, f Framing, o ResponseOptions) []byte {
	if o.Minor == 0 {
		dst = append(dst, "HTTP/1.0 "...)
	} else {
		dst = append(dst, "HTTP/1.1 "...)
	}
	dst = strconv.AppendUint(dst, uint64(h.Status), 10)
	dst = append(dst, ' ')
	dst = append(dst, reason(h.Status)...)
	dst = append(dst, "\r\n"...)
	noBody := o.Head || bodiless(h.Status)
	spelled := h.Status == 101
	keepLength := noBody && h.Status >= 200 && h.Status != 204
	for i := range h.Fields {
		fd := &h.Fields[i]
		switch classify(fd.Name) {
		case endToEnd:
			dst = appendSpelled(dst, fd, spelled)
		case lengthField:
			if keepLength {
				dst = appendField(dst, fd)
				keepLength = false
			}
		case hostField:
			dst = appendField(dst, fd) // only a request's host means anything
		}
	}
	switch {
	case noBody:
	case f == None:
		dst = appendFraming(dst, Length, 0)
	default:
		dst = appendFraming(dst, f, h.Length)
	}
	switch {
	case h.Status == 101:
		if h.Upgrade != nil {
			dst = append(dst, "Connection: Upgrade\r\n"...)
			dst = appendUpgrade(dst, h.Upgrade)
		}
	case h.Status < 200: // the final response says what becomes of the connection
	case o.Close || f == ToClose && !noBody:
		dst = append(dst, "connection: close\r\n"...)
	case o.KeepAlive10:
		dst = append(dst, "connection: keep-alive\r\n"...)
	}
	return append(dst, "\r\n"...)
}

// AppendChunk appends p as one chunk. An empty p appends nothing, for an empty
// chunk would end the body.
func AppendChunk(dst, p []byte) []byte {
	if len(p) == 0 {
		return dst
	}
	dst = strconv.AppendUint(dst, uint64(len(p)), 16)
	dst = append(dst, "\r\n"...)
	dst = append(dst, p...)
	return append(dst, "\r\n"...)
}

// AppendLast appends the end of a chunked body with its trailer fields. Those
// that may not be trailers (see BodyReader.Trailers) are left out.
func AppendLast(dst []byte, trailers []httpmsg.Field) []byte {
	dst = append(dst, "0\r\n"...)
	for i := range trailers {
		if !barred(trailers[i].Name) {
			dst = appendField(dst, &trailers[i])
		}
	}
	return append(dst, "\r\n"...)
}

// fieldClass says who writes a field.
type fieldClass uint8

const (
	endToEnd    fieldClass = iota
	lengthField            // content-length: made from the framing
	teField                // te: only as "trailers"
	hostField              // host: made from the authority
	hopByHop               // made from the framing, from options, or not at all
)

func classify(name []byte) fieldClass {
	switch string(name) {
	case "content-length":
		return lengthField
	case "te":
		return teField
	case "host":
		return hostField
	case "connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade":
		return hopByHop
	}
	return endToEnd
}

func appendField(dst []byte, f *httpmsg.Field) []byte {
	dst = append(dst, f.Name...)
	dst = append(dst, ": "...)
	dst = append(dst, f.Value...)
	return append(dst, "\r\n"...)
}

// appendSpelled is appendField that writes, where it is asked for, the names of a WebSocket
// handshake as RFC 6455 does: there are ends that compare them letter by letter.
func appendSpelled(dst []byte, f *httpmsg.Field, spelled bool) []byte {
	const ws = "sec-websocket-"
	if spelled && len(f.Name) > len(ws) && string(f.Name[:len(ws)]) == ws {
		at := len(dst) + len(ws)
		dst = append(append(dst, "Sec-WebSocket-"...), f.Name[len(ws):]...)
		if c := dst[at]; c >= 'a' && c <= 'z' {
			dst[at] = c - 'a' + 'A'
		}
		dst = append(append(dst, ": "...), f.Value...)
		return append(dst, "\r\n"...)
	}
	return appendField(dst, f)
}

func appendFraming(dst []byte, f Framing, length int64) []byte {
	switch f {
	case Length:
		dst = append(dst, "content-length: "...)
		dst = strconv.AppendInt(dst, length, 10)
		dst = append(dst, "\r\n"...)
	case Chunked:
		dst = append(dst, "transfer-encoding: chunked\r\n"...)
	}
	return dst
}

func appendUpgrade(dst, protocol []byte) []byte {
	if protocol == nil {
		return dst
	}
	dst = append(dst, "Upgrade: "...)
	dst = append(dst, protocol...)
	return append(dst, "\r\n"...)
}
