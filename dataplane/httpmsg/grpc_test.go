package httpmsg

import "testing"

// TestGRPCStatus: a refusal of a call has the status of gRPC's http-grpc-status-mapping.md, and what is too large the one
// that gRPC's libraries give it, whoever refuses: the proxy or an authorization service.
func TestGRPCStatus(t *testing.T) {
	for status, want := range map[int]int{400: 13, 401: 16, 403: 7, 404: 12, 413: 8, 431: 8, 429: 14, 502: 14, 503: 14, 504: 14, 418: 2, 500: 2} {
		if got := GRPCStatus(status); got != want {
			t.Errorf("%d: %d, want %d", status, got, want)
		}
	}
}
