package httpmsg

import "bytes"

// hostByte marks the bytes of a registered name (RFC 3986 section 3.2.2) but "%".
var hostByte = func() (t [256]bool) {
	for c := range t {
		t[c] = isDigit(byte(c)) || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
	}
	for _, c := range []byte("-._~!$&'()*+,;=") {
		t[c] = true
	}
	return t
}()

// Authority judges host [":" port] (RFC 3986 section 3.2): a registered name without "%" escapes, an IPv4 address
// or an IPv6 one in brackets, without user information (RFC 9110 section 4.2.4); a port of 1 to 65535 without
// leading zeros, which is the one way to write it that all readers take for the same. a is v without an empty port,
// and aliases it; port: there is one. An empty authority is one, a port without a host is none. It
// does not allocate. Both codecs refuse what it refuses, whatever connection it comes on.
func Authority(v []byte) (a []byte, port, ok bool) {
	i := 0
	if len(v) > 0 && v[0] == '[' {
		end := bytes.IndexByte(v, ']')
		if end < 0 || !isIPv6(v[1:end]) {
			return nil, false, false
		}
		i = end + 1
	} else {
		for i < len(v) && hostByte[v[i]] {
			i++
		}
	}
	switch {
	case i == len(v):
		return v, false, true
	case v[i] != ':' || i == 0 || len(v)-i > 6:
		return nil, false, false
	case i+1 == len(v):
		return v[:i:i], false, true
	}
	if v[i+1] == '0' {
		return nil, false, false
	}
	n := 0
	for _, c := range v[i+1:] {
		if !isDigit(c) {
			return nil, false, false
		}
		n = n*10 + int(c-'0')
	}
	return v, true, n <= 65535
}

// isIPv6 reports whether v is an IPv6 address without a zone (RFC 3986 3.2.2).
func isIPv6(v []byte) bool {
	groups, gap, i := 0, false, 0
	if len(v) >= 2 && v[0] == ':' && v[1] == ':' {
		gap, i = true, 2
	}
	for i < len(v) {
		from := i
		for i < len(v) && i-from < 4 && isHex(v[i]) {
			i++
		}
		if i < len(v) && v[i] == '.' { // the last 32 bits as an IPv4 address
			groups += 2
			return isIPv4(v[from:]) && (groups == 8 && !gap || groups < 8 && gap)
		}
		if i == from {
			return false
		}
		if groups++; groups > 8 {
			return false
		}
		if i == len(v) {
			break
		}
		if v[i] != ':' {
			return false
		}
		if i++; i == len(v) {
			return false
		}
		if v[i] == ':' {
			if gap {
				return false
			}
			gap = true
			i++
		}
	}
	return groups == 8 && !gap || groups < 8 && gap
}

// isIPv4 reports whether v is four decimal numbers up to 255 without leading zeros.
func isIPv4(v []byte) bool {
	parts, n, digits := 1, 0, 0
	for _, c := range v {
		if c == '.' {
			if digits == 0 {
				return false
			}
			parts++
			n, digits = 0, 0
			continue
		}
		if !isDigit(c) || digits > 0 && n == 0 {
			return false
		}
		n = n*10 + int(c-'0')
		if digits++; n > 255 {
			return false
		}
	}
	return parts == 4 && digits > 0
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func isHex(c byte) bool { return isDigit(c) || c|0x20 >= 'a' && c|0x20 <= 'f' }
