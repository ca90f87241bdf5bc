package httpmsg

import "time"

// GRPC is the content type of gRPC, without a message encoding.
const GRPC = "application/grpc"

// IsGRPC reports whether a content-type is gRPC's (gRPC over HTTP/2: "application/grpc"
// with an encoding after "+", or parameters). gRPC-Web is not.
func IsGRPC(contentType []byte) bool {
	return len(contentType) >= len(GRPC) && string(contentType[:len(GRPC)]) == GRPC &&
		(len(contentType) == len(GRPC) || contentType[len(GRPC)] == '+' || contentType[len(GRPC)] == ';')
}

// GRPCTimeout is the limit of time of a grpc-timeout field: at most 8 digits and a unit
// (PROTOCOL-HTTP2.md of gRPC). false: it is none, or none that a clock can meet.
func GRPCTimeout(v []byte) (d time.Duration, ok bool) {
	if len(v) < 2 || len(v) > 9 {
		return 0, false
	}
	n := int64(0)
	for _, c := range v[:len(v)-1] {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	var unit time.Duration
	switch v[len(v)-1] {
	case 'H':
		unit = time.Hour
	case 'M':
		unit = time.Minute
	case 'S':
		unit = time.Second
	case 'm':
		unit = time.Millisecond
	case 'u':
		unit = time.Microsecond
	case 'n':
		unit = time.Nanosecond
	default:
		return 0, false
	}
	d = time.Duration(n) * unit
	return d, d/unit == time.Duration(n) && d <= longTimeout
}

// longTimeout is what no timer is worth: 99999999H is 11,000 years.
const longTimeout = 30 * 24 * time.Hour

// GRPCMessage percent-encodes text, without the line ends at its end, for a grpc-message field.
func GRPCMessage(text string) []byte {
	b := make([]byte, 0, len(text)+8)
	for len(text) > 0 && text[len(text)-1] == '\n' {
		text = text[:len(text)-1]
	}
	for i := range len(text) {
		if c := text[i]; c < 0x20 || c > 0x7e || c == '%' {
			const up = "0123456789ABCDEF"
			b = append(b, '%', up[c>>4], up[c&15])
		} else {
			b = append(b, c)
		}
	}
	return b
}

// GRPCStatus is the grpc-status of a local answer that has this HTTP status, by which clients
// decide what to do: as gRPC maps the statuses of proxies that do not know it
// (http-grpc-status-mapping.md of gRPC: what is not there is UNKNOWN), and RESOURCE_EXHAUSTED
// for what is too large, as its libraries say themselves.
func GRPCStatus(status int) int {
	switch status {
	case 400:
		return 13 // INTERNAL
	case 401:
		return 16 // UNAUTHENTICATED
	case 403:
		return 7 // PERMISSION_DENIED
	case 404:
		return 12 // UNIMPLEMENTED
	case 413, 431:
		return 8 // RESOURCE_EXHAUSTED
	case 429, 502, 503, 504:
		return 14 // UNAVAILABLE: clients may try again
	}
	return 2 // UNKNOWN
}
