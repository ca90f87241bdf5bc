package decide

import (
	"strconv"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// ApplyRequest changes a request that is forwarded as its rules say: authority
// and path first, then fields, then the query (contract 10.2, 10.7). What needs memory is
// appended to scratch, which is returned; the head keeps slices of it and of the
// snapshot, so both live as long as the head does. It allocates only when
// scratch or h.Fields have no room. To be called once, after AuthzPath was asked for.
func (v *Verdict) ApplyRequest(h *httpmsg.Head, scratch []byte) []byte {
	p := v.Pipe
	if p == nil || v.Action != Forward {
		return scratch
	}
	if w := p.Rewrite; w != nil {
		if w.Host != nil {
			h.Authority = w.Host
		}
		if w.Path.Kind != model.PathKept {
			start := len(scratch)
			scratch = editPath(scratch, w.Path, h.Path, v.Prefix)
			h.Path = scratch[start:len(scratch):len(scratch)]
		}
	}
	snapshot.Apply(p.Request, h)
	if len(p.Query) > 0 {
		scratch, h.Path = editQuery(scratch, p.Query, h.Path)
	}
	return scratch
}

// ApplyResponse changes the fields of the answer to a request that was forwarded or
// redirected: a browser may follow a redirection only if its answer says so.
// origin is the request's Origin field as it came, nil if it had none; the head keeps it.
func (v *Verdict) ApplyResponse(h *httpmsg.Head, origin []byte) {
	p := v.Pipe
	if p == nil || v.Action != Forward && (v.Action != Reply || v.Reason != Redirect) {
		return
	}
	snapshot.Apply(p.Response, h)
	if p.CORS != nil {
		mark(p.CORS, h, origin)
	}
}

// Origin is r's Origin field, for ApplyResponse and MarkAnswer; nil: it has none, or no rule
// asks for it. To be taken before ApplyRequest.
func (v *Verdict) Origin(r *httpmsg.Head) []byte {
	if v.CORS == nil {
		return nil
	}
	o, _ := r.Get(string(hdrOrigin))
	return o
}

// AuthzPath is the second path, with its query, that the authorization service is
// asked about: what an application may read r's path as. nil: there is none. It allocates.
func (v *Verdict) AuthzPath(r *httpmsg.Head) []byte {
	if !v.Respelled {
		return nil
	}
	path, _ := cutPath(r.Path)
	norm, thirdReading, ok := plain(path)
	if thirdReading || !ok {
		return nil // not reached: such a path is refused
	}
	return append(norm, r.Path[len(path):]...)
}

// Location appends to dst the value of the Location field of a redirection (Gateway
// API HTTPRequestRedirectFilter): what the rule does not name is the
// request's. f and r are what Route was asked with.
func (v *Verdict) Location(dst []byte, f *model.Flow, r *httpmsg.Head) []byte {
	if v.Pipe == nil || v.Pipe.Redirect == nil {
		return dst
	}
	d := v.Pipe.Redirect
	scheme := d.Scheme
	if scheme == "" {
		scheme = "http"
	}
	dst = append(append(dst, scheme...), "://"...)
	switch {
	case d.Host != "":
		dst = append(dst, d.Host...)
	default:
		host := len(dst)
		if dst = appendHost(dst, r.Authority); len(dst) == host { // a dialled address was enough to name the service
			dst = appendAddress(dst, f.Dst.Addr())
		}
	}
	port := d.Port
	if port == 0 && d.Scheme == "" {
		port = askedPort(f, r.Authority)
	}
	if port != 0 && !(scheme == "http" && port == 80) && !(scheme == "https" && port == 443) {
		dst = strconv.AppendUint(append(dst, ':'), uint64(port), 10)
	}
	if string(r.Path) == "*" && d.Path.Kind != model.PathFull {
		return dst // the authority is all there is of it (RFC 9112 3.3)
	}
	return editPath(dst, d.Path, r.Path, v.Prefix)
}

// askedPort is the port a client asked for: the authority's, else the one it dialled.
// The proxy port is no service's: whoever came to it and named no port meant 80. 0: not known.
func askedPort(f *model.Flow, authority []byte) uint16 {
	if i := portAt(authority); i >= 0 {
		if n, ok := snapshot.ParsePort(authority[i+1:]); ok {
			return n
		}
	}
	if f.Dir == model.Captured && f.Dst.Port() != model.PortProxy {
		return f.Dst.Port()
	}
	return 0
}

// EditQuery returns target with the changes to its query that somebody other than the
// rules asks for. It allocates. false: the query has more parameters than are looked at.
func EditQuery(ops []snapshot.Op, target []byte) ([]byte, bool) {
	if _, query := cutPath(target); manyParameters(query) {
		return nil, false
	}
	_, out := editQuery(nil, ops, target)
	return out, true
}
