package decide

import (
	"bytes"
	"regexp"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// cutPath splits a request's target at its query.
func cutPath(target []byte) (path, query []byte) {
	if i := bytes.IndexByte(target, '?'); i >= 0 {
		return target[:i], target[i+1:]
	}
	return target, nil
}

// match is the first arm that r fulfils with this path, or nil (contract 10.3).
func match(p *snapshot.Program, r *httpmsg.Head, path, query []byte, t *Trace) *snapshot.Arm {
	for i := range p.Arms {
		a := &p.Arms[i]
		switch {
		case t == nil && ends(a.Path, path) && (a.PathKind == model.PathPrefix || a.PathKind == model.PathExact):
			continue // most arms of most programs: not worth a call
		case !pathMatches(a, path):
			if t != nil {
				t.add("%s: path %q is not %s", armText(a), path, pathText(a))
			}
			continue
		case a.Method != "" && a.Method != string(r.Method):
			if t != nil {
				t.add("%s: method %s is not %s", armText(a), r.Method, a.Method)
			}
			continue
		}
		if h := unmetField(a.Headers, r); h != nil {
			if t != nil {
				t.add("%s: field %s is not %s", armText(a), h.Name, valueText(h))
			}
			continue
		}
		if q := unmetParameter(a.Query, query); q != nil {
			if t != nil {
				t.add("%s: query parameter %s is not %s", armText(a), q.Name, valueText(q))
			}
			continue
		}
		if t != nil {
			t.add("%s: matches", armText(a))
		}
		return a
	}
	return nil
}

// ends reports that path cannot begin with want: it is shorter, or want's last character is another.
func ends(want string, path []byte) bool {
	n := len(want)
	return n > len(path) || n > 0 && want[n-1] != path[n-1]
}

// pathMatches compares the path as it is spelled; a prefix ends at an element's
// end (Gateway API PathMatchPathPrefix).
func pathMatches(a *snapshot.Arm, path []byte) bool {
	if a.GRPC != nil {
		return grpcMatches(a.GRPC, path)
	}
	switch a.PathKind {
	case model.PathAny:
		return true
	case model.PathExact:
		return string(path) == a.Path
	case model.PathRegex:
		return a.Regex != nil && a.Regex.Match(path)
	}
	n := len(a.Path)
	return len(path) >= n && string(path[:n]) == a.Path && (n == 0 || len(path) == n || path[n] == '/')
}

// grpcMatches compares "/service/method", both not empty (contract 10.6). What
// names neither matches every request.
func grpcMatches(g *snapshot.GRPCArm, path []byte) bool {
	if g.Service == "" && g.ServiceRegex == nil && g.Method == "" && g.MethodRegex == nil {
		return true
	}
	if len(path) == 0 || path[0] != '/' {
		return false
	}
	service, method, ok := bytes.Cut(path[1:], slash)
	if !ok || len(service) == 0 || len(method) == 0 || bytes.IndexByte(method, '/') >= 0 {
		return false
	}
	return element(g.Service, g.ServiceRegex, service) && element(g.Method, g.MethodRegex, method)
}

var slash = []byte("/")

func element(want string, re *regexp.Regexp, got []byte) bool {
	if re != nil {
		return re.Match(got)
	}
	return want == "" || string(got) == want
}

// unmetField is the first field condition that r does not fulfil, or nil.
func unmetField(want []snapshot.ValueMatch, r *httpmsg.Head) *snapshot.ValueMatch {
	for i := range want {
		w := &want[i]
		if w.Regex == nil && !fieldIs(r, w.Name, w.Value) || w.Regex != nil && !fieldFits(r, w.Name, w.Regex) {
			return w
		}
	}
	return nil
}

// fieldIs compares the whole value of a field: lines of one name count as one,
// joined by commas (RFC 9110 5.3), with or without a space.
func fieldIs(r *httpmsg.Head, name, want string) bool {
	if name == "host" { // a codec takes it out of the fields
		return string(r.Authority) == want
	}
	seen := false
	rest := want
	for i := range r.Fields {
		if string(r.Fields[i].Name) != name {
			continue
		}
		if seen {
			if len(rest) == 0 || rest[0] != ',' {
				return false
			}
			rest = rest[1:]
			if len(rest) > 0 && rest[0] == ' ' {
				rest = rest[1:]
			}
		}
		seen = true
		v := r.Fields[i].Value
		if len(rest) < len(v) || rest[:len(v)] != string(v) {
			return false
		}
		rest = rest[len(v):]
	}
	return seen && rest == ""
}

// fieldFits is fieldIs for an expression. Only a field of several lines costs
// an allocation: they are joined by a comma.
func fieldFits(r *httpmsg.Head, name string, re *regexp.Regexp) bool {
	if name == "host" {
		return len(r.Authority) > 0 && re.Match(r.Authority)
	}
	first, lines := -1, 0
	for i := range r.Fields {
		if string(r.Fields[i].Name) == name {
			if lines++; lines == 1 {
				first = i
			}
		}
	}
	switch lines {
	case 0:
		return false
	case 1:
		return re.Match(r.Fields[first].Value)
	}
	var joined []byte
	for i := range r.Fields {
		if string(r.Fields[i].Name) == name {
			if i > first {
				joined = append(joined, ',')
			}
			joined = append(joined, r.Fields[i].Value...)
		}
	}
	return re.Match(joined)
}

// unmetParameter is the first query condition that is not fulfilled, or nil. Of
// a parameter that stands there more than once the first counts.
func unmetParameter(want []snapshot.ValueMatch, query []byte) *snapshot.ValueMatch {
	for i := range want {
		w := &want[i]
		value, ok := parameter(query, w.Name)
		if !ok || w.Regex == nil && !decodesTo(value, w.Value) || w.Regex != nil && !w.Regex.Match(plainValue(value)) {
			return w
		}
	}
	return nil
}

// parameter is the value, as it is spelled, of the first parameter whose name
// decodes to name.
func parameter(query []byte, name string) (value []byte, ok bool) {
	for len(query) > 0 {
		var p []byte
		p, query = nextParameter(query)
		n, v := cutParameter(p)
		if len(p) > 0 && decodesTo(n, name) {
			return v, true
		}
	}
	return nil, false
}

func nextParameter(query []byte) (p, rest []byte) {
	if i := bytes.IndexByte(query, '&'); i >= 0 {
		return query[:i], query[i+1:]
	}
	return query, nil
}

func cutParameter(p []byte) (name, value []byte) {
	if i := bytes.IndexByte(p, '='); i >= 0 {
		return p[:i], p[i+1:]
	}
	return p, nil
}

// decodesTo compares the decoded form of a name or value with want.
func decodesTo(spelled []byte, want string) bool {
	k := 0
	for i := 0; i < len(spelled); k++ {
		c, n := decoded(spelled[i:])
		if k >= len(want) || want[k] != c {
			return false
		}
		i += n
	}
	return k == len(want)
}

// decoded is the first character of a parameter's name or value, and how many
// bytes it takes. A plus is a space; an escape that is none stands for itself.
func decoded(b []byte) (c byte, n int) {
	if b[0] == '+' {
		return ' ', 1
	}
	return unescaped(b)
}

// unescaped is decoded for a path, where a plus is a plus.
func unescaped(b []byte) (c byte, n int) {
	if b[0] == '%' && len(b) > 2 {
		if hi, lo := hexDigit(b[1]), hexDigit(b[2]); hi < 16 && lo < 16 {
			return hi<<4 | lo, 3
		}
	}
	return b[0], 1
}

// hexDigit is the digit's number; 16 or more: it is none.
func hexDigit(c byte) byte {
	switch {
	case c >= '0' && c <= '9':
		return c - '0'
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10
	case c >= 'A' && c <= 'F':
		return c - 'A' + 10
	}
	return 16
}

// plainValue is a parameter's value decoded. It allocates only where there is something to decode.
func plainValue(v []byte) []byte {
	if bytes.IndexByte(v, '%') < 0 && bytes.IndexByte(v, '+') < 0 {
		return v
	}
	out := make([]byte, 0, len(v))
	for i := 0; i < len(v); {
		c, n := decoded(v[i:])
		out = append(out, c)
		i += n
	}
	return out
}
