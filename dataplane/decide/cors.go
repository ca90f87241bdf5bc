package decide

import (
	"bytes"

	"aether/dataplane/httpmsg"
	"aether/dataplane/snapshot"
)

// Names of the fields of the CORS protocol (Fetch, "HTTP-network-or-cache fetch").
var (
	hdrOrigin           = []byte("origin")
	hdrVary             = []byte("vary")
	hdrRequestMethod    = []byte("access-control-request-method")
	hdrRequestHeaders   = []byte("access-control-request-headers")
	hdrAllowOrigin      = []byte("access-control-allow-origin")
	hdrAllowCredentials = []byte("access-control-allow-credentials")
	hdrAllowMethods     = []byte("access-control-allow-methods")
	hdrAllowHeaders     = []byte("access-control-allow-headers")
	hdrExposeHeaders    = []byte("access-control-expose-headers")
	hdrMaxAge           = []byte("access-control-max-age")

	valueTrue   = []byte("true")
	valueOrigin = []byte("Origin")
	valueAny    = []byte("*")
)

// preflight reports whether r asks what a request from elsewhere may do.
func preflight(r *httpmsg.Head) bool {
	if string(r.Method) != "OPTIONS" {
		return false
	}
	if _, ok := r.Get(string(hdrOrigin)); !ok {
		return false
	}
	_, ok := r.Get(string(hdrRequestMethod))
	return ok
}

// AppendPreflight adds to h, the answer to the preflight r, what the rule's CORS
// filter allows: nothing where r's origin is not allowed. The head keeps
// slices of r. It allocates only when h.Fields has no room.
func (v *Verdict) AppendPreflight(h, r *httpmsg.Head) {
	if v.Pipe == nil || v.Pipe.CORS == nil {
		return
	}
	c := v.Pipe.CORS
	origin, _ := r.Get(string(hdrOrigin))
	if !allowed(c, origin) {
		return
	}
	appendOrigin(c, h, origin)
	if c.AnyMethod && c.Credentials { // "*" would mean a method of that name (Fetch)
		if m, ok := r.Get(string(hdrRequestMethod)); ok {
			h.Add(hdrAllowMethods, m)
		}
	} else if len(c.Methods) > 0 {
		h.Add(hdrAllowMethods, c.Methods)
	}
	if c.AnyHeader && c.Credentials {
		if m, ok := r.Get(string(hdrRequestHeaders)); ok {
			h.Add(hdrAllowHeaders, m)
		}
	} else if len(c.Headers) > 0 {
		h.Add(hdrAllowHeaders, c.Headers)
	}
	if len(c.Expose) > 0 {
		h.Add(hdrExposeHeaders, c.Expose)
	}
	if len(c.MaxAge) > 0 {
		h.Add(hdrMaxAge, c.MaxAge)
	}
}

// MarkAnswer says on h, an answer that the proxy itself makes to the request in the place of
// an application's, who may read it: else a browser shows its page an error of CORS
// in the place of the status. origin is as ApplyResponse has it. It allocates only when h.Fields has no room.
func (v *Verdict) MarkAnswer(h *httpmsg.Head, origin []byte) {
	if v.CORS != nil {
		mark(v.CORS, h, origin)
	}
}

// appendOrigin adds what preflights and answers have in common.
func appendOrigin(c *snapshot.CORS, h *httpmsg.Head, origin []byte) {
	if c.AnyOrigin && !c.Credentials {
		h.Add(hdrAllowOrigin, valueAny)
	} else {
		h.Add(hdrAllowOrigin, origin)
		if !varies(h) {
			h.Add(hdrVary, valueOrigin)
		}
	}
	if c.Credentials {
		h.Add(hdrAllowCredentials, valueTrue)
	}
}

// varies reports whether h says already that its answer depends on the origin.
func varies(h *httpmsg.Head) bool {
	for i := range h.Fields {
		if string(h.Fields[i].Name) != string(hdrVary) {
			continue
		}
		for rest := h.Fields[i].Value; len(rest) > 0; {
			var item []byte
			item, rest, _ = bytes.Cut(rest, comma)
			if item = bytes.TrimSpace(item); bytes.EqualFold(item, hdrOrigin) || string(item) == "*" {
				return true
			}
		}
	}
	return false
}

var comma = []byte(",")

// mark says on the answer h to a request from origin who may read it. What the
// application wrote of the fields that decide this does not get out, whoever asks:
// else an origin that the rule forbids could be let in by the application. And
// wherever the answer depends on the origin it says so, lest a cache gives
// the answer to one to another (Fetch, "CORS protocol and HTTP caches").
func mark(c *snapshot.CORS, h *httpmsg.Head, origin []byte) {
	h.Del(string(hdrAllowOrigin))
	h.Del(string(hdrAllowCredentials))
	h.Del(string(hdrExposeHeaders))
	if (!c.AnyOrigin || c.Credentials) && !varies(h) {
		h.Add(hdrVary, valueOrigin)
	}
	if !allowed(c, origin) {
		return
	}
	appendOrigin(c, h, origin)
	if len(c.Expose) > 0 {
		h.Add(hdrExposeHeaders, c.Expose)
	}
}

// maxOrigin bounds an origin that is looked at: a scheme, a DNS name, a port.
const maxOrigin = 300

// allowed compares an origin with those of the filter: scheme and host without
// regard to case, the scheme's own port left off (Fetch, RFC 6454 6.1).
func allowed(c *snapshot.CORS, origin []byte) bool {
	if len(origin) == 0 {
		return false
	}
	if c.AnyOrigin {
		return true
	}
	if len(origin) > maxOrigin {
		return false
	}
	var buf [maxOrigin]byte
	for i, b := range origin {
		if b >= 'A' && b <= 'Z' {
			b += 'a' - 'A'
		}
		buf[i] = b
	}
	o := buf[:len(origin)]
	if bytes.HasPrefix(o, []byte("https://")) {
		o = bytes.TrimSuffix(o, []byte(":443"))
	} else if bytes.HasPrefix(o, []byte("http://")) {
		o = bytes.TrimSuffix(o, []byte(":80"))
	}
	for i := range c.Origins {
		w := &c.Origins[i]
		n := len(w.Prefix) + len(w.Suffix)
		if len(o) < n || string(o[:len(w.Prefix)]) != w.Prefix || string(o[len(o)-len(w.Suffix):]) != w.Suffix {
			continue
		}
		if between := o[len(w.Prefix) : len(o)-len(w.Suffix)]; w.Wild == (len(between) > 0) && labels(between) {
			return true
		}
	}
	return false
}

// labels reports whether b can be part of a host: what "*" stands for is neither a port nor a path.
func labels(b []byte) bool {
	for _, c := range b {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.' && c != '_' {
			return false
		}
	}
	return true
}
