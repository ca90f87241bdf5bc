package mutants

// All are the breaks, in the order of the properties they break (design 5).
var All = []Mutant{
	{
		Property: "every input gets a valid action",
		File:     "dataplane/decide/route.go",
		Old:      "return Verdict{Action: Refuse, Reason: NoVerdict, Status: 500, Text: textNoVerdict}",
		New:      "return Verdict{}",
		Package:  "./dataplane/decide", Run: "TestNoDirection|TestEveryQuestionIsAnswered",
	},
	{
		Property: "explain agrees with decide",
		File:     "dataplane/decide/route.go",
		Old:      "if a := match(prog, r, path, query, t); a != nil {",
		New:      "if a := match(prog, r, path, query, t); a != nil && (t == nil || a.Index < 2) {",
		Package:  "./dataplane/decide", Run: "TestExplainAgrees",
	},
	{
		Property: "no policy is walked around by a spelling",
		File:     "dataplane/decide/path.go",
		Old:      `case '%', '\\', ';':`,
		New:      `case '%', ';':`,
		Package:  "./dataplane/decide", Run: "TestNoSpellingIsDelivered",
	},
	{
		Property: "no policy is walked around by a dot segment",
		File:     "dataplane/decide/path.go",
		Old:      "if other != chosen && (carries(chosen) || carries(other)) {",
		New:      "if other != chosen && carries(chosen) {",
		Package:  "./dataplane/decide", Run: "TestNoSpellingIsDelivered",
	},
	{
		Property: "a policy that denies denies",
		File:     "dataplane/decide/policy.go",
		Old:      "allowed := (held != nil) != f.Deny",
		New:      "allowed := held != nil",
		Package:  "./dataplane/decide", Run: "TestGolden",
	},
	{
		Property: "nobody is verified at the source",
		File:     "dataplane/decide/policy.go",
		Old:      "if p.SPIFFEID != \"\" && p.SPIFFEID == peer ||",
		New:      "if p.SPIFFEID != \"\" ||",
		Package:  "./dataplane/decide", Run: "TestGolden",
	},
	{
		Property: "the dialled port decides",
		File:     "dataplane/decide/route.go",
		Old:      "case isHTTP && (byHost || named == 0 || named == port):",
		New:      "case isHTTP:",
		Package:  "./dataplane/decide", Run: "TestGolden",
	},
	{
		Property: "a pin takes no other endpoint",
		File:     "dataplane/decide/choose.go",
		Old:      "return set, e, e != nil",
		New:      "return set, e, true",
		Package:  "./dataplane/decide", Run: "TestGolden",
	},
	{
		Property: "a consumer route is for its own namespace",
		File:     "dataplane/snapshot/service.go",
		Old:      "if c := p.Consumers[caller]; c != nil {",
		New:      "for _, c := range p.Consumers {",
		Package:  "./dataplane/decide", Run: "TestGolden",
	},
	{
		Property: "a short name is of the caller's namespace",
		File:     "dataplane/snapshot/name.go",
		Old:      "if i, ok := t.names[string(full)]; ok && t.Services[i].Kubernetes {",
		New:      "if i, ok := t.names[string(full)]; ok {",
		Package:  "./dataplane/decide", Run: "TestGolden",
	},
	{
		Property: "nothing is allocated",
		File:     "dataplane/decide/route.go",
		Old:      "path, query := cutPath(r.Path)\n\tchosen, self, prefix := p.Self, p.Self, 0",
		New:      "path, query := cutPath(append([]byte(nil), r.Path...))\n\tchosen, self, prefix := p.Self, p.Self, 0",
		Package:  "./dataplane/decide", Run: "TestDecideAllocs",
	},
}
