package sniff

import "bytes"

// RequestHost finds the authority of the first request in b, the first bytes of a
// connection that Detect calls HTTP10 or HTTP11: that of an absolute-form target,
// which wins over Host (RFC 9112 section 3.2.2), else the value of the first Host
// field. host is as it was sent, spaces around it removed, and aliases b.
//
// While more is set it takes more bytes to tell. Without more, ok says whether
// there is an authority: not when the head has none, names it
// emptily, is not HTTP/1, or does not show it in MaxPeek bytes. The target of a CONNECT is no
// authority of a service (contract 4.8): ok is false for it. For h2c there is
// nothing here to read; HEADERS are for an HTTP/2 codec.
//
// The name is for choosing where a connection goes. It is not validated, and a
// second Host field is not looked for: that is for the codec that serves the request.
func RequestHost(b []byte) (host []byte, more, ok bool) {
	var s State
	return s.RequestHost(b)
}

// RequestHost is the function RequestHost for a buffer that grows: lines gone
// through once are not gone through again.
func (s *State) RequestHost(b []byte) (host []byte, more, ok bool) {
	b = b[:min(len(b), MaxPeek)]
	for s.line <= len(b) {
		n := bytes.IndexByte(b[s.line:], '\n')
		if n < 0 {
			break
		}
		line := bytes.TrimSuffix(b[s.line:s.line+n], []byte{'\r'})
		switch {
		case s.line == 2*s.before && s.before < MaxEmptyLines && n == 1 && b[s.line] == '\r': // an empty line before the request
			s.before++
		case s.line == 2*s.before:
			if host, found := targetHost(line); found {
				return host, false, len(host) > 0
			}
		case len(line) == 0:
			return nil, false, false // the end of the head
		case isHost(line):
			host := bytes.Trim(line[5:], " \t")
			return host, false, len(host) > 0
		}
		s.line += n + 1
	}
	return nil, len(b) < MaxPeek, false
}

// isHost reports whether line is a Host field.
func isHost(line []byte) bool {
	return len(line) > 4 && line[4] == ':' &&
		line[0]|0x20 == 'h' && line[1]|0x20 == 'o' && line[2]|0x20 == 's' && line[3]|0x20 == 't'
}

// targetHost reads a request line. found says that Host need not be looked
// at: host is then the authority, nil where there can be none.
func targetHost(line []byte) (host []byte, found bool) {
	space := bytes.IndexByte(line, ' ')
	if space < 0 {
		return nil, true
	}
	method, target := line[:space], line[space+1:]
	if space = bytes.IndexByte(target, ' '); space < 0 {
		return nil, true
	}
	target, proto := target[:space], target[space+1:]
	if len(proto) != len(version)+1 || string(proto[:len(version)]) != version || string(method) == "CONNECT" {
		return nil, true
	}
	if len(target) > 0 && target[0] == '/' {
		return nil, false // origin-form, perhaps with a "://" in it
	}
	scheme, after, ok := bytes.Cut(target, []byte("://"))
	if !ok || !isScheme(scheme) {
		return nil, false // asterisk-form, or a target that is no URI
	}
	if i := bytes.IndexAny(after, "/?#"); i >= 0 {
		after = after[:i]
	}
	return after, true
}

// isScheme reports whether b is a URI scheme (RFC 3986 section 3.1).
func isScheme(b []byte) bool {
	for i, c := range b {
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (i == 0 || (c < '0' || c > '9') && c != '+' && c != '-' && c != '.') {
			return false
		}
	}
	return len(b) > 0
}
