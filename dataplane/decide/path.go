package decide

import (
	"bytes"
	"net/netip"
	"slices"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// maxRounds is how often an escape may be escaped. What is still not plain then
// is refused where there is policy.
const maxRounds = 4

// hasAliases reports whether a path could be read as another one.
func hasAliases(path []byte) bool {
	for i, c := range path {
		switch c {
		case '%', '\\', ';':
			return true
		case '/':
			if i+1 < len(path) && (path[i+1] == '/' || path[i+1] == '.') {
				return true
			}
		}
	}
	return false
}

// plain is the path, without its query, as the most forgiving application reads
// it: escapes decoded until there are none, backslashes as slashes, no path
// parameters, no empty elements, no dot segments (RFC 3986 5.2.4). A trailing slash stays.
// thirdReading says that there is another reading than this and the raw one: a ".." among its elements,
// from which whoever decodes less, or knows no ";" or backslash, climbs elsewhere; a slash
// that is escaped, or a backslash, behind a ";" (who cuts first does not see it); a NUL, which
// ends the text of some. ok is false when maxRounds were not enough. It allocates.
func plain(path []byte) (out []byte, thirdReading, ok bool) {
	b, ok := fullyDecoded(path)
	if !ok {
		return path, false, false
	}
	thirdReading = bytes.IndexByte(b, 0) >= 0 || hidesSlash(path)
	out = append(make([]byte, 0, len(b)+1), '/')
	for i := 0; i < len(b); {
		if b[i] == '/' || b[i] == '\\' {
			i++
			continue
		}
		end := i
		for end < len(b) && b[end] != '/' && b[end] != '\\' {
			end++
		}
		name := b[i:end]
		closed := end < len(b)
		i = end
		if j := bytes.IndexByte(name, ';'); j >= 0 {
			name = name[:j]
		}
		switch string(name) {
		case "", ".":
			continue
		case "..":
			thirdReading = true
			if len(out) > 1 { // the root is above itself
				out = out[:1+bytes.LastIndexByte(out[:len(out)-1], '/')]
			}
			continue
		}
		out = append(out, name...)
		if closed {
			out = append(out, '/')
		}
	}
	return out, thirdReading, true
}

// fullyDecoded is b with its escapes decoded until there are none; ok is false when maxRounds were not enough.
func fullyDecoded(b []byte) (out []byte, ok bool) {
	b = append(make([]byte, 0, len(b)), b...)
	for round := 0; bytes.IndexByte(b, '%') >= 0; round++ {
		k := 0
		for i := 0; i < len(b); k++ {
			c, n := unescaped(b[i:])
			b[k] = c
			i += n
		}
		if k == len(b) {
			break // what looks like an escape is none
		}
		if round == maxRounds {
			return nil, false
		}
		b = b[:k]
	}
	return b, true
}

// hidesSlash reports whether an element of the path, as it is split before anything is decoded,
// holds a ";" and something behind it that may be read as a slash.
func hidesSlash(path []byte) bool {
	for len(path) > 0 {
		name, rest, _ := bytes.Cut(path, []byte("/"))
		path = rest
		if bytes.IndexByte(name, '%') < 0 && bytes.IndexByte(name, ';') < 0 {
			continue
		}
		b, _ := fullyDecoded(name)
		if i := bytes.IndexByte(b, ';'); i >= 0 && bytes.ContainsAny(b[i:], "/\\") {
			return true
		}
	}
	return false
}

// checkPathAliases is the path policy (decision 009) for a request at its source: if the path
// as it is spelled and as it may be read choose different rules, neither may carry policy; of one
// rule, RBAC must judge both alike for the caller; and where any rule of the port carries
// policy, no path may have a third reading. bypasses names what a refused path could get around.
func (q *question) checkPathAliases() (result reading, bypasses string) {
	if !policed(q.prog, q.self) {
		return oneReading, ""
	}
	norm, thirdReading, ok := plain(q.path)
	if !ok {
		q.t.deepEscapes(q.path)
		return refused, policyName(q.prog, q.rule, q.self)
	}
	if bytes.Equal(norm, q.path) {
		return oneReading, ""
	}
	q.t.alias(q.path, norm)
	other := q.self
	if q.prog != nil {
		a, large := match(q.prog, q.r, norm, q.query, q.t)
		if large {
			return tooLarge, a.Rule.Name
		}
		if a != nil {
			other = a.Rule
		}
	}
	if other != q.rule && (carries(q.rule) || carries(other)) {
		q.t.aliasChoosesOther(q.rule, other)
		return refused, policyName(nil, other, q.rule)
	}
	if thirdReading {
		q.t.thirdReading(q.path, "port")
		return refused, policyName(q.prog, q.rule, other, q.self)
	}
	if q.rule != nil && q.rule.Pipe != nil { // one rule, whose RBAC may name paths
		if f := aliasVerdict(q.rule.Pipe.RBAC, q.caller(), q.r.Method, q.path, norm, q.t); f != nil {
			return refused, f.Name
		}
	}
	return twoReadings, ""
}

// reading is what the path policy makes of a path.
type reading uint8

const (
	oneReading  reading = iota // there is no other, or no policy to care
	twoReadings                // and policy is to be asked about both
	refused
	tooLarge // for the other spelling to be matched
)

// aliasVerdict is the filter that judges two spellings of a path differently, or nil.
func aliasVerdict(list []snapshot.RBAC, peer string, method, path, norm []byte, t *Trace) *snapshot.RBAC {
	a, b := denies(list, peer, method, path, nil, nil), denies(list, peer, method, norm, nil, nil)
	if (a == nil) == (b == nil) {
		return nil
	}
	if a == nil {
		a = b
	}
	t.aliasJudgedOtherwise(a, path, norm)
	return a
}

// policed reports whether any rule of a port carries policy.
func policed(p *snapshot.Program, self *snapshot.Rule) bool {
	return carries(self) || p != nil && p.Policy
}

// carries reports whether access is decided in a rule. One that cannot be
// honoured may have been meant to.
func carries(r *snapshot.Rule) bool { return r != nil && (r.Invalid != "" || r.Pipe.Policy()) }

// policyName is the first object that decides access, of the rules first and of the program then.
func policyName(p *snapshot.Program, rules ...*snapshot.Rule) string {
	if p != nil {
		for i := range p.Arms {
			rules = append(rules, p.Arms[i].Rule)
		}
	}
	for _, r := range rules {
		switch {
		case !carries(r):
		case r.Invalid != "":
			return r.Name
		default:
			return firstPolicy(r.Pipe)
		}
	}
	return ""
}

// firstPolicy names the first filter of p that decides access.
func firstPolicy(p *snapshot.FilterChain) string {
	for i := range p.RBAC {
		if !p.RBAC[i].Audit {
			return p.RBAC[i].Name
		}
	}
	if p.Authz != nil {
		return p.Authz.Name
	}
	return ""
}

// editPath appends path and query of target, with an edit on the path, to dst
// (Gateway API HTTPPathModifier; contract 10.2). prefix is the length of what a prefix match matched.
func editPath(dst []byte, e model.PathEdit, target []byte, prefix int) []byte {
	path, _ := cutPath(target)
	switch {
	case e.Kind == model.PathFull:
		dst = append(dst, e.Value...)
	case e.Kind == model.PathPrefixPart && (len(path) == 0 || path[0] == '/') && prefix <= len(path): // not "*"
		value := e.Value
		for len(value) > 0 && value[len(value)-1] == '/' {
			value = value[:len(value)-1]
		}
		rest := path[prefix:]
		if len(path) == 1 { // the root is no element: "/" by "/n" is "/n"
			rest = nil
		}
		if value == "" && len(rest) == 0 {
			value = "/"
		}
		dst = append(append(dst, value...), rest...)
	default:
		dst = append(dst, path...)
	}
	return append(dst, target[len(path):]...)
}

// editQuery changes the query of target by ops, in order, each in one pass. What is
// written goes behind dst, which is returned, into two places by turns: many ops need
// no more room than two. out is the target then: target itself where nothing
// changed. Parameters that no op names stay as they are spelled.
func editQuery(dst []byte, ops []snapshot.Op, target []byte) (_, out []byte) {
	room := len(target)
	for i := range ops {
		room += 2 + 3*(len(ops[i].Name)+len(ops[i].Value)) // a separator, "=", everything escaped
	}
	start := len(dst)
	dst = slices.Grow(dst, min(len(ops), 2)*room)
	at, end := start, start // the place that is written to, and the end of what is read
	for i := range ops {
		to, changed := appendQuery(dst[at:at:at+room], &ops[i], target)
		if !changed {
			continue
		}
		target, end = to[:len(to):len(to)], at+len(to)
		at = start + room - (at - start) // the other place
	}
	return dst[:end], target
}

// appendQuery appends target with one change to dst. changed is false, and what was
// written means nothing, where the op changes nothing.
func appendQuery(dst []byte, o *snapshot.Op, target []byte) (_ []byte, changed bool) {
	path, query := cutPath(target)
	dst = append(dst, path...)
	sep := byte('?')
	there := false
	for len(query) > 0 {
		var p []byte
		p, query = nextParameter(query)
		name, _ := cutParameter(p)
		if o.Kind != model.AppendIfExistsOrAdd && len(p) > 0 && decodesTo(name, string(o.Name)) {
			first := !there
			there = true
			switch {
			case o.Kind == model.AddIfAbsent:
				return dst, false
			case o.Kind == model.RemoveAll, !first:
				continue
			}
			dst = append(dst, sep)
			sep = '&'
			dst = appendParameter(dst, o)
			continue
		}
		dst = append(dst, sep)
		sep = '&'
		dst = append(dst, p...)
	}
	switch o.Kind {
	case model.RemoveAll, model.OverwriteIfExists:
		return dst, there
	}
	if !there {
		dst = appendParameter(append(dst, sep), o)
	}
	return dst, true
}

// appendParameter writes name=value with everything escaped that is not unreserved (RFC 3986 2.3).
func appendParameter(dst []byte, o *snapshot.Op) []byte {
	return appendEscaped(append(appendEscaped(dst, o.Name), '='), o.Value)
}

func appendEscaped(dst, b []byte) []byte {
	const digits = "0123456789ABCDEF"
	for _, c := range b {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '.', c == '_', c == '~':
			dst = append(dst, c)
		default:
			dst = append(dst, '%', digits[c>>4], digits[c&15])
		}
	}
	return dst
}

// appendHost appends the host of an authority, without its port.
func appendHost(dst, authority []byte) []byte {
	if i := portAt(authority); i >= 0 {
		authority = authority[:i]
	}
	return append(dst, authority...)
}

// portAt is the place of the colon before an authority's port, or -1. The colons of
// an IPv6 address stand in brackets.
func portAt(authority []byte) int {
	i := bytes.LastIndexByte(authority, ':')
	if i < 0 || bytes.IndexByte(authority[i:], ']') >= 0 {
		return -1
	}
	return i
}

// appendAddress appends an address as the host of a URI (RFC 3986 3.2.2).
func appendAddress(dst []byte, a netip.Addr) []byte {
	a = a.Unmap()
	if a.Is6() {
		return append(a.WithZone("").AppendTo(append(dst, '[')), ']')
	}
	return a.AppendTo(dst)
}
