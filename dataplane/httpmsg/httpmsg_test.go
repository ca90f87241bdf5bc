package httpmsg

import (
	"slices"
	"testing"
	"time"
)

// TestProxyOnly: each field that only a proxy may set is one in every mix of "-" and "_", and no other field is.
func TestProxyOnly(t *testing.T) {
	for _, name := range []string{"x-forwarded-client-cert", "x-aether-outcome", "x-aether-error", "x-aether-declined", "x-envoy-auth-partial-body"} {
		var dashes []int
		for i := range name {
			if name[i] == '-' {
				dashes = append(dashes, i)
			}
		}
		for mix := range 1 << len(dashes) {
			b := []byte(name)
			for k, i := range dashes {
				if mix>>k&1 != 0 {
					b[i] = '_'
				}
			}
			if !ProxyOnly(b) || !ProxyOnlyTrailer(b) {
				t.Errorf("%s: head %v, trailer %v, want both", b, ProxyOnly(b), ProxyOnlyTrailer(b))
			}
			for _, other := range []string{string(b) + "s", string(b[1:]), "y" + string(b)} {
				if ProxyOnly([]byte(other)) {
					t.Errorf("%s is taken for one", other)
				}
			}
		}
	}
	for name, trailer := range map[string]bool{"x-aether-ip": true, "x_aether-subset_a": true, "x-aether-": true, "x-aether": false, "": false, "grpc-status": false, "x-forwarded-for": false} {
		if ProxyOnly([]byte(name)) || ProxyOnlyTrailer([]byte(name)) != trailer {
			t.Errorf("%s: head %v, trailer %v", name, ProxyOnly([]byte(name)), ProxyOnlyTrailer([]byte(name)))
		}
	}
	h := Head{Fields: []Field{{Name: []byte("a")}, {Name: []byte("x_aether_error")}, {Name: []byte("b")}}}
	if has := h.HasProxyOnly(); !has {
		t.Error("none found")
	}
	h.DelProxyOnly()
	if names := func() (n []string) {
		for _, f := range h.Fields {
			n = append(n, string(f.Name))
		}
		return n
	}(); !slices.Equal(names, []string{"a", "b"}) || h.HasProxyOnly() {
		t.Errorf("left: %v", names)
	}
}

// TestGRPCTimeout: what is a limit of time and what is none (PROTOCOL-HTTP2.md of gRPC).
func TestGRPCTimeout(t *testing.T) {
	for v, want := range map[string]time.Duration{
		"1H": time.Hour, "2M": 2 * time.Minute, "3S": 3 * time.Second, "100m": 100 * time.Millisecond, "00000005u": 5 * time.Microsecond,
		"99999999n": 99_999_999, "0S": 0, "99999999S": -1, "99999999H": -1, "123456789m": -1, "": -1, "S": -1, "5": -1, "5s": -1, "-5S": -1, "+5S": -1, " 5S": -1, "5.5S": -1, "5 S": -1,
	} {
		got, ok := GRPCTimeout([]byte(v))
		if ok != (want >= 0) || ok && got != want {
			t.Errorf("%q: %v, %v, want %v", v, got, ok, want)
		}
	}
}
