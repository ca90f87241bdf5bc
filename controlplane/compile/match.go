package compile

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Bounds of one regular expression: of its text in bytes, and of its compiled
// form in instructions. RE2 takes time linear in both; these keep a decision short.
const (
	maxPattern = 1024
	maxProgram = 4096
)

// maxPrograms bounds the instructions of all regular expressions in force on one
// port for one group of callers: each may be run for one request.
const maxPrograms = 4096

// maxText is the most bytes that an expression is run on, and maxWork bounds the
// whole of a request: bytes times the instructions of all expressions. Above 32
// instructions the text becomes shorter, down to 64 bytes at maxPrograms. A request is decided in
// one piece on a loop that others wait for, and each step may take 8 ns.
const (
	maxText = 8 << 10
	maxWork = 256 << 10
)

// maxConditions bounds the fields, and the parameters, of one match; it is the
// Gateway API's own maximum.
const maxConditions = 16

// maxArms bounds the matches in force on one port for one group of callers.
const maxArms = 1024

// compiledMatch is a match and its place in the order of precedence.
type compiledMatch struct {
	snapshot.Match
	rank rank
	cost int // instructions of its regular expressions
}

// rank orders matches: where two differ first, the higher one goes first. It is
// that of the match as it was asked for, conditions left out included.
type rank [5]int

func (r rank) compare(o rank) int { return slices.Compare(o[:], r[:]) }

// first is the place of what could not be read in the order of its kind: nobody knows
// what it was meant to go before, so nothing of that kind goes before it. A lower place
// would give the requests that its rule governs, and now refuses, to another rule.
const first = math.MaxInt

// httpRank is the Gateway API's order of HTTPRoute matches (contract 10.3): an
// exact path, then a regular expression, then a prefix; longer above shorter; a
// method; more fields; more parameters. What is left is the older route, its
// name, the order in it.
func (r *matchReader) httpRank(a *snapshot.Match, m *model.Match, headers, query int) rank {
	kind, length := 0, len(a.Path)
	switch m.PathKind {
	case model.PathExact:
		kind = 2
	case model.PathRegex:
		kind, length = 1, len(m.Path)
	case model.PathAny, model.PathPrefix:
	default:
		kind = 2
	}
	if r.unread.path {
		length = first
	}
	method := 0
	if m.Method != "" {
		method = 1
	}
	if m.Unread {
		method, headers, query = first, first, first
	}
	return rank{kind, length, method, headers, query}
}

// grpcRank is that of GRPCRoute matches: more characters of the service, of the
// method; then what is exact; then more fields.
func (r *matchReader) grpcRank(m *model.Match, headers int) rank {
	if m.Unread {
		return rank{first, first, first, first}
	}
	if m.GRPC == nil {
		return rank{0, 0, 1, headers}
	}
	service, method, exact := len(m.GRPC.Service), len(m.GRPC.Method), 1
	if m.GRPC.Regex {
		exact = 0
	}
	if r.unread.service {
		service = first
	}
	if r.unread.method {
		method = first
	}
	return rank{service, method, exact, headers}
}

// matchReader compiles the matches of one rule.
type matchReader struct {
	kind    model.RouteKind
	invalid string // why the rule cannot be honoured
	cost    int    // instructions of the regular expressions of the match
	// unread are the conditions of the match that were left out.
	unread struct{ path, service, method bool }
}

// refuse makes the rule one that refuses. The condition at fault is then left
// out of the match, which stands where it stood or before that, so that what the
// rule was written to govern is not left to others.
func (r *matchReader) refuse(format string, args ...any) {
	r.invalid = cmp.Or(r.invalid, fmt.Sprintf(format, args...))
}

// read compiles a match.
func (r *matchReader) read(m *model.Match) (out compiledMatch) {
	r.cost = 0
	r.unread.path, r.unread.service, r.unread.method = false, false, false
	if m.Unread {
		r.refuse("a condition of a match cannot be read")
	}
	a := &out.Match
	a.PathKind, a.Path, a.Method = m.PathKind, m.Path, m.Method
	switch m.PathKind {
	case model.PathAny:
		a.Path = ""
	case model.PathExact, model.PathPrefix:
		if r.unread.path = !strings.HasPrefix(m.Path, "/"); r.unread.path {
			r.refuse("path %q can match nothing: it must begin with /", m.Path)
		}
		if m.PathKind == model.PathPrefix {
			a.Path = strings.TrimRight(m.Path, "/")
		}
	case model.PathRegex:
		a.Regex = r.regex("path", m.Path)
		r.unread.path = a.Regex == nil
	case model.PathUnread:
		r.refuse("the path of a match cannot be read")
		r.unread.path = true
	default:
		r.refuse("unknown kind of path match %d", m.PathKind)
		r.unread.path = true
	}
	if r.unread.path {
		a.PathKind, a.Path = model.PathAny, ""
	}
	if g := m.GRPC; g != nil && (g.Service != "" || g.Method != "") {
		a.GRPC = &snapshot.GRPCArm{Service: g.Service, Method: g.Method}
		if g.Regex {
			a.GRPC.ServiceRegex, a.GRPC.Service, r.unread.service = r.element("service", g.Service)
			a.GRPC.MethodRegex, a.GRPC.Method, r.unread.method = r.element("method", g.Method)
		}
	}
	headers := r.values("field", m.Headers, &a.Headers)
	query := r.values("parameter", m.Query, &a.Query)
	out.cost = r.cost
	if r.kind == model.GRPCRoute {
		out.rank = r.grpcRank(m, headers)
	} else {
		out.rank = r.httpRank(a, m, headers, query)
	}
	return out
}

// element compiles a part of a gRPC match. The text is kept where there is an
// expression; an expression that cannot be compiled gives neither, and is unread.
func (r *matchReader) element(what, pattern string) (re *regexp.Regexp, text string, unread bool) {
	if pattern == "" {
		return nil, "", false
	}
	if re := r.regex(what, pattern); re != nil {
		return re, pattern, false
	}
	return nil, "", true
}

// values compiles the conditions on fields or parameters, and counts them. Of
// one name the first counts (Gateway API HTTPHeaderMatch, HTTPQueryParamMatch).
func (r *matchReader) values(what string, in []model.ValueMatch, out *[]snapshot.ValueMatch) int {
	asked := 0
	if len(in) > maxConditions {
		r.refuse("a match has %d conditions on a %s, and %d are the most: split it over rules, or ask for less", len(in), what, maxConditions)
		asked, in = len(in), in[:maxConditions]
	}
	var seen []string
	for i := range in {
		v := snapshot.ValueMatch{Name: in[i].Name, Value: in[i].Value}
		if what == "field" {
			v.Name = strings.ToLower(v.Name)
		}
		if slices.Contains(seen, v.Name) {
			continue
		}
		seen = append(seen, v.Name)
		if what == "field" && !token(v.Name) {
			r.refuse("%q is no field name", v.Name)
			continue
		}
		if in[i].Regex {
			if v.Regex = r.regex(what+" "+v.Name, v.Value); v.Regex == nil {
				continue
			}
		}
		*out = append(*out, v)
	}
	return max(len(seen), asked)
}

// regex compiles a pattern that must match the whole; nil, and the rule refuses, if it cannot.
func (r *matchReader) regex(what, pattern string) *regexp.Regexp {
	re, cost, why := compileRegex(pattern)
	if why != "" {
		r.refuse("the %s's regular expression %s", what, why)
		return nil // it is never run, and costs nothing
	}
	r.cost += cost
	return re
}

// compileRegex compiles an RE2 expression, anchored at both ends, within the
// bounds; cost is its instructions.
func compileRegex(pattern string) (re *regexp.Regexp, cost int, why string) {
	if len(pattern) > maxPattern {
		return nil, 0, fmt.Sprintf("has %d bytes, and %d are the most: split it over matches", len(pattern), maxPattern)
	}
	// On its own first: "a)(b" must not become valid between our brackets.
	tree, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return nil, 0, fmt.Sprintf("%q cannot be read: %v", pattern, err)
	}
	prog, err := syntax.Compile(tree.Simplify())
	if err != nil {
		return nil, 0, fmt.Sprintf("%q cannot be compiled: %v", pattern, err)
	}
	if len(prog.Inst) > maxProgram {
		return nil, 0, fmt.Sprintf("%q compiles to %d instructions, and %d are the most: use smaller repetitions", pattern, len(prog.Inst), maxProgram)
	}
	if strings.Contains(pattern, `\Q`) {
		pattern = tree.String() // an open quotation would take our bracket in
	}
	re, err = regexp.Compile(`\A(?:` + pattern + `)\z`)
	if err != nil {
		return nil, 0, fmt.Sprintf("%q cannot be compiled: %v", pattern, err)
	}
	return re, len(prog.Inst), ""
}
