package httpmsg

import "slices"

// proxyOnly are the fields that only a proxy may set (contract 5.7, 5.9, 5.10): nobody else's
// reach an application, or a proxy that acts on them.
var proxyOnly = [...]string{
	"x-forwarded-client-cert",
	"x-aether-outcome",
	"x-aether-error",
	"x-aether-declined",
	"x-envoy-auth-partial-body",
}

const ours = "x-aether-"

// ProxyOnly reports whether a field, its name in lower case, is one that only a proxy may set, in any
// spelling that an application may take for it: those that make variables of fields (CGI, RFC 3875
// 4.1.18) cannot tell "_" from "-".
func ProxyOnly(name []byte) bool {
	if len(name) < len(ours) || name[0] != 'x' {
		return false
	}
	for _, s := range proxyOnly {
		if like(name, s) {
			return true
		}
	}
	return false
}

// ProxyOnlyTrailer is ProxyOnly for trailers, in which no x-aether-* field means anything.
func ProxyOnlyTrailer(name []byte) bool {
	return len(name) >= len(ours) && like(name[:len(ours)], ours) || ProxyOnly(name)
}

// DelProxyOnly removes every field that is ProxyOnly, keeping the order.
func (h *Head) DelProxyOnly() {
	h.Fields = slices.DeleteFunc(h.Fields, func(f Field) bool { return ProxyOnly(f.Name) })
}

// DelMesh removes every field that is ProxyOnly and every other x-aether-* field, keeping the order: where
// no proxy of the mesh reads the message any more.
func (h *Head) DelMesh() {
	h.Fields = slices.DeleteFunc(h.Fields, func(f Field) bool { return ProxyOnlyTrailer(f.Name) })
}

// HasProxyOnly reports whether DelProxyOnly would remove a field.
func (h *Head) HasProxyOnly() bool {
	return slices.ContainsFunc(h.Fields, func(f Field) bool { return ProxyOnly(f.Name) })
}

func like(b []byte, name string) bool {
	if len(b) != len(name) {
		return false
	}
	for i := range b {
		if b[i] != name[i] && (b[i] != '_' || name[i] != '-') {
			return false
		}
	}
	return true
}
