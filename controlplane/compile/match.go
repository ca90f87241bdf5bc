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
const maxPrograms = 16384

// maxText is the most bytes that an expression is run on, and maxWork bounds the
// whole of a request: bytes times the instructions of all expressions. Above some
// 500 instructions the text becomes shorter.
const (
	maxText = 8 << 10
	maxWork = 4 << 20
)

// maxConditions bounds the fields, and the parameters, of one match; it is the
// Gateway API's own maximum.
const maxConditions = 16

// maxArms bounds the matches in force on one port for one group of callers.
const maxArms = 1024

// arm is a match and its place in the order of precedence.
type arm struct {
	snapshot.Arm
	rank rank
	cost int // instructions of its regular expressions
}

// rank orders matches: where two differ first, the higher one goes first. It is
// that of the match as it was asked for, conditions left out included.
type rank [5]int

func (r rank) compare(o rank) int { return slices.Compare(o[:], r[:]) }

// httpRank is the Gateway API's order of HTTPRoute matches (contract 10.3): an
// exact path, then a regular expression, then a prefix; longer above shorter; a
// method; more fields; more parameters. What is left is the older route, its
// name, the order in it.
func httpRank(a *snapshot.Arm, m *model.Match, headers, query int) rank {
	kind, length := 0, len(a.Path)
	switch m.PathKind {
	case model.PathExact:
		kind = 2
	case model.PathRegex:
		kind, length = 1, len(m.Path)
	case model.PathAny, model.PathPrefix:
	default: // nobody knows what it was meant to go before
		kind, length = 2, math.MaxInt
	}
	method := 0
	if a.Method != "" {
		method = 1
	}
	return rank{kind, length, method, headers, query}
}

// grpcRank is that of GRPCRoute matches: more characters of the service, of the
// method; then what is exact; then more fields.
func grpcRank(m *model.Match, headers int) rank {
	if m.GRPC == nil {
		return rank{0, 0, 1, headers}
	}
	exact := 1
	if m.GRPC.Regex {
		exact = 0
	}
	return rank{len(m.GRPC.Service), len(m.GRPC.Method), exact, headers}
}

// matchReader compiles the matches of one rule.
type matchReader struct {
	kind    model.RouteKind
	warn    func(format string, args ...any) // of a match that can never hold
	invalid string                           // why the rule cannot be honoured
	cost    int                              // instructions of the regular expressions of the match
}

// refuse makes the rule one that refuses. The condition at fault is then left
// out of the match, so that what the rule was written to govern is not left to others.
func (r *matchReader) refuse(format string, args ...any) {
	r.invalid = cmp.Or(r.invalid, fmt.Sprintf(format, args...))
}

// read compiles a match; ok is false for one that can never hold.
func (r *matchReader) read(m *model.Match) (out arm, ok bool) {
	r.cost = 0
	a := &out.Arm
	a.PathKind, a.Path, a.Method = m.PathKind, m.Path, m.Method
	switch m.PathKind {
	case model.PathAny:
		a.Path = ""
	case model.PathExact, model.PathPrefix:
		if !strings.HasPrefix(m.Path, "/") {
			r.warn("path %q can match nothing: it must begin with /", m.Path)
			return out, false
		}
		if m.PathKind == model.PathPrefix {
			a.Path = strings.TrimRight(m.Path, "/")
		}
	case model.PathRegex:
		if a.Regex = r.regex("path", m.Path); a.Regex == nil {
			a.PathKind, a.Path = model.PathAny, ""
		}
	default:
		r.refuse("unknown kind of path match %d", m.PathKind)
		a.PathKind, a.Path = model.PathAny, ""
	}
	if g := m.GRPC; g != nil && (g.Service != "" || g.Method != "") {
		a.GRPC = &snapshot.GRPCArm{Service: g.Service, Method: g.Method}
		if g.Regex {
			a.GRPC.ServiceRegex, a.GRPC.Service = r.element("service", g.Service)
			a.GRPC.MethodRegex, a.GRPC.Method = r.element("method", g.Method)
		}
	}
	headers, ok := r.values("field", m.Headers, &a.Headers)
	if !ok {
		return out, false
	}
	query, _ := r.values("parameter", m.Query, &a.Query)
	out.cost = r.cost
	if r.kind == model.GRPCRoute {
		out.rank = grpcRank(m, headers)
	} else {
		out.rank = httpRank(a, m, headers, query)
	}
	return out, true
}

// element compiles a part of a gRPC match. The text is kept where there is an
// expression; an expression that cannot be compiled gives neither.
func (r *matchReader) element(what, pattern string) (*regexp.Regexp, string) {
	if pattern == "" {
		return nil, ""
	}
	if re := r.regex(what, pattern); re != nil {
		return re, pattern
	}
	return nil, ""
}

// values compiles the conditions on fields or parameters, and counts them. Of
// one name the first counts (Gateway API HTTPHeaderMatch, HTTPQueryParamMatch).
func (r *matchReader) values(what string, in []model.ValueMatch, out *[]snapshot.ValueMatch) (n int, ok bool) {
	asked := 0
	if len(in) > maxConditions {
		r.refuse("a match has %d conditions on a %s, and %d are the most: split it over rules, or ask for less", len(in), what, maxConditions)
		asked, in = len(in), in[:maxConditions]
	}
	var seen []string
	for i := range in {
		v := snapshot.ValueMatch{Name: in[i].Name, Value: in[i].Value}
		if what == "field" {
			if v.Name = strings.ToLower(v.Name); !token(v.Name) {
				r.warn("%q is no field name, so that match can never hold", v.Name)
				return 0, false
			}
		}
		if slices.Contains(seen, v.Name) {
			continue
		}
		seen = append(seen, v.Name)
		if in[i].Regex {
			if v.Regex = r.regex(what+" "+v.Name, v.Value); v.Regex == nil {
				continue
			}
		}
		*out = append(*out, v)
	}
	return max(len(seen), asked), true
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
