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

// maxParameters bounds what conditions on the query look at, as Program.MaxText
// bounds the text of expressions. What is larger is not "no match", which would give
// it to another rule: it is refused.
const maxParameters = 256

// manyParameters reports whether a query has more parameters than are looked at.
func manyParameters(query []byte) bool {
	return len(query) > maxParameters && bytes.Count(query, ampersand) >= maxParameters
}

var ampersand = []byte("&")

// match is the first arm that r fulfils with this path, or nil (contract 10.3). large:
// r is too large for the arm, and so nobody can say whether it fulfils it.
//
// A CORS preflight asks about another request (Fetch, "CORS-preflight fetch"), whose method
// and field names it has as values: by these it fulfils the arms of a rule with a CORS filter, which
// answers it (GEP-1767: it must not reach the application). What it is literally counts, too.
func match(p *snapshot.Program, r *httpmsg.Head, path, query []byte, t *Trace) (_ *snapshot.Match, large bool) {
	m := matcher{r: r, path: path, query: query, most: p.MaxText, t: t}
	if preflight(r) {
		m.preflight = true
		m.asked, _ = r.Get(string(hdrRequestMethod))
		m.names, _ = r.Get(string(hdrRequestHeaders))
	}
	for i := range p.Arms {
		a := &p.Arms[i]
		if t == nil && cannotMatch(a.Path, path) && (a.PathKind == model.PathPrefix || a.PathKind == model.PathExact) {
			continue // most arms of most programs: not worth a call
		}
		switch m.arm(a) {
		case fulfilled:
			t.armMatches(a)
			return a, false
		case undecidable:
			return a, true
		}
	}
	return nil, false
}

// matcher holds one request against arms.
type matcher struct {
	r           *httpmsg.Head
	path, query []byte
	most        int // bytes that an expression is run on
	t           *Trace

	preflight    bool   // r asks about another request
	asked, names []byte // whose method and fields these are
}

// fit is what a request is to a condition.
type fit uint8

const (
	unmet fit = iota
	fulfilled
	undecidable // the request is too large to tell
)

// arm holds the request against all conditions of an arm, the cheapest first.
func (m *matcher) arm(a *snapshot.Match) fit {
	switch {
	case len(m.path) > m.most && hasPathRegex(a):
		m.t.longPath(a, m.path, m.most)
		return undecidable
	case !pathMatches(a, m.path):
		m.t.otherPath(a, m.path)
		return unmet
	case a.Method != "" && a.Method != string(m.r.Method) && !(m.preflight && a.Method == string(m.asked) && answersPreflight(a)):
		m.t.otherMethod(a, m.r.Method)
		return unmet
	}
	if len(a.Headers) > 0 {
		if f := m.fields(a); f != fulfilled {
			return f
		}
	}
	if len(a.Query) > 0 {
		return m.parameters(a)
	}
	return fulfilled
}

func hasPathRegex(a *snapshot.Match) bool {
	return a.Regex != nil || a.GRPC != nil && (a.GRPC.ServiceRegex != nil || a.GRPC.MethodRegex != nil)
}

// fields holds the request's fields against the conditions on them.
func (m *matcher) fields(a *snapshot.Match) fit {
	var promised []byte
	if m.preflight && len(m.names) > 0 && answersPreflight(a) {
		if promised = m.names; len(promised) > maxNames {
			m.t.longNames(a)
			return undecidable
		}
	}
	h, large := unmetField(a.Headers, m.r, promised, m.most)
	switch {
	case large:
		m.t.longField(a, h, m.most)
		return undecidable
	case h != nil:
		m.t.otherField(a, h)
		return unmet
	}
	return fulfilled
}

// parameters holds the request's query against the conditions on it.
func (m *matcher) parameters(a *snapshot.Match) fit {
	if manyParameters(m.query) {
		m.t.longQuery(a)
		return undecidable
	}
	q, large := unmetParameter(a.Query, m.query, m.most)
	switch {
	case large:
		m.t.longParameter(a, q, m.most)
		return undecidable
	case q != nil:
		m.t.otherParameter(a, q)
		return unmet
	}
	return fulfilled
}

// cannotMatch reports that path cannot begin with want: it is shorter, or want's last character is another.
func cannotMatch(want string, path []byte) bool {
	n := len(want)
	return n > len(path) || n > 0 && want[n-1] != path[n-1]
}

// pathMatches compares the path as it is spelled; a prefix ends at an element's
// end (Gateway API PathMatchPathPrefix).
func pathMatches(a *snapshot.Match, path []byte) bool {
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

// maxNames bounds, in bytes, the list of field names of a preflight that is held against
// conditions on fields: each of these goes through it.
const maxNames = 1 << 10

// answersPreflight reports whether the arm's rule answers preflights.
func answersPreflight(a *snapshot.Match) bool {
	return a.Rule.Invalid == "" && a.Rule.Pipe != nil && a.Rule.Pipe.CORS != nil
}

// lists reports whether a field's name, in lower case, stands in a comma-separated list of names.
func lists(list []byte, name string) bool {
	for len(list) > 0 {
		var item []byte
		item, list, _ = bytes.Cut(list, comma)
		if item = bytes.TrimSpace(item); len(item) != len(name) {
			continue
		}
		same := true
		for i, c := range item {
			same = same && httpmsg.Lower[c] == name[i]
		}
		if same {
			return true
		}
	}
	return false
}

// unmetField is the first field condition that r does not fulfil, or nil; large: its
// field is too long to tell. promised lists fields that the request to come has, with
// values that nobody knows yet.
func unmetField(want []snapshot.ValueMatch, r *httpmsg.Head, promised []byte, most int) (_ *snapshot.ValueMatch, large bool) {
	for i := range want {
		w := &want[i]
		if len(promised) > 0 && lists(promised, w.Name) {
			continue
		}
		if w.Regex == nil {
			if !fieldIs(r, w.Name, w.Value) {
				return w, false
			}
			continue
		}
		if fits, large := fieldFits(r, w.Name, w.Regex, most); large || !fits {
			return w, large
		}
	}
	return nil, false
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
// an allocation: they are joined by a comma. large: all of it is more than most bytes.
func fieldFits(r *httpmsg.Head, name string, re *regexp.Regexp, most int) (fits, large bool) {
	if name == "host" {
		if len(r.Authority) > most {
			return false, true
		}
		return len(r.Authority) > 0 && re.Match(r.Authority), false
	}
	first, lines, size := -1, 0, -1
	for i := range r.Fields {
		if string(r.Fields[i].Name) == name {
			if lines++; lines == 1 {
				first = i
			}
			size += 1 + len(r.Fields[i].Value)
		}
	}
	switch {
	case lines == 0:
		return false, false
	case size > most:
		return false, true
	case lines == 1:
		return re.Match(r.Fields[first].Value), false
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
	return re.Match(joined), false
}

// unmetParameter is the first query condition that is not fulfilled, or nil. Of
// a parameter that stands there more than once the first counts. large: its value is too long to tell.
func unmetParameter(want []snapshot.ValueMatch, query []byte, most int) (_ *snapshot.ValueMatch, large bool) {
	for i := range want {
		w := &want[i]
		value, ok := parameter(query, w.Name)
		switch {
		case !ok:
			return w, false
		case w.Regex == nil:
			if !decodesTo(value, w.Value) {
				return w, false
			}
			continue
		}
		v := plainValue(value)
		if len(v) > most {
			return w, true
		}
		if !w.Regex.Match(v) {
			return w, false
		}
	}
	return nil, false
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
