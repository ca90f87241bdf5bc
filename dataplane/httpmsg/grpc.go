package httpmsg

// GRPC is the content type of gRPC, without a message encoding.
const GRPC = "application/grpc"

// IsGRPC reports whether a content-type is gRPC's (gRPC over HTTP/2: "application/grpc"
// with an encoding after "+", or parameters). gRPC-Web is not.
func IsGRPC(contentType []byte) bool {
	return len(contentType) >= len(GRPC) && string(contentType[:len(GRPC)]) == GRPC &&
		(len(contentType) == len(GRPC) || contentType[len(GRPC)] == '+' || contentType[len(GRPC)] == ';')
}

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
