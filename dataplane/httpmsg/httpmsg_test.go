package httpmsg

import (
	"slices"
	"testing"
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
