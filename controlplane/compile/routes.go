package compile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// route is an HTTPRoute with its rules compiled.
type route struct {
	*model.Route
	rules []*snapshot.Rule
}

func (r *route) object() string { return "HTTPRoute " + r.Namespace + "/" + r.Name }

// collectRoutes takes the routes, oldest first (contract 10.3). Of two with one
// name neither is in force, but their matches are kept and refuse: what they
// were written to govern is not left ungoverned.
func (c *compiler) collectRoutes() []*route {
	var routes []*route
	count := map[model.ServiceName]int{} // a route's name has the same two parts
	for i := range c.mesh.Routes {
		r := &c.mesh.Routes[i]
		routes = append(routes, &route{Route: r})
		count[model.ServiceName{Namespace: r.Namespace, Name: r.Name}]++
	}
	slices.SortFunc(routes, func(a, b *route) int {
		if d := cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name)); d != 0 {
			return d
		}
		return cmp.Compare(fmt.Sprint(*a.Route), fmt.Sprint(*b.Route))
	})
	for _, r := range routes {
		twice := ""
		if count[model.ServiceName{Namespace: r.Namespace, Name: r.Name}] > 1 {
			twice = "there are two HTTPRoutes of this name"
			c.problem(r.object(), "%s: requests that match either get 500; delete one", twice)
		}
		for i := range r.Rules {
			r.rules = append(r.rules, c.rule(r, i, twice))
		}
	}
	return routes
}

// attach hangs every route on the ports that its parents name (contract 10.1).
func (c *compiler) attach(routes []*route) {
	for _, r := range routes {
		for _, p := range r.Parents {
			s := c.services[p.Service]
			if s == nil {
				c.problem(r.object(), "parentRef Service %s: there is no such service in the mesh (NoMatchingParent); check the name, or wait for its pods", p.Service)
				continue
			}
			if s.broken != "" {
				s.routed = true // its names are refused, the Kubernetes ones included
				continue
			}
			hung := false
			for _, vp := range s.ports {
				if vp.class != model.HTTP || p.Port != 0 && p.Port != vp.number {
					continue
				}
				hung = true
				if !slices.Contains(s.attached[vp.number], r) {
					s.attached[vp.number] = append(s.attached[vp.number], r)
				}
			}
			switch {
			case hung:
				s.routed = true
			case p.Port == 0:
				c.problem(r.object(), "parentRef Service %s: it has no HTTP port (NoMatchingParent); declare one in endpoint.aether.io/ports", p.Service)
			default:
				c.problem(r.object(), "parentRef Service %s port %d: that is no HTTP port of it (NoMatchingParent); it serves %s", p.Service, p.Port, s.portList())
			}
		}
	}
}

// portList is "8080 (http), 9000 (tcp)", or "no port".
func (s *service) portList() string {
	var out []string
	for _, p := range s.ports {
		out = append(out, fmt.Sprintf("%d (%s)", p.number, p.class))
	}
	return cmp.Or(strings.Join(out, ", "), "no port")
}

// program merges the rules of routes into one list by precedence.
func (c *compiler) program(routes []*route) *snapshot.Program {
	p := &snapshot.Program{}
	for _, r := range routes {
		for i, rule := range r.rules {
			if len(r.Rules[i].Matches) == 0 {
				p.Arms = append(p.Arms, snapshot.Arm{PathKind: model.PathAny, Rule: rule})
				continue
			}
			for j := range r.Rules[i].Matches {
				if a, ok := c.arm(r, &r.Rules[i].Matches[j], rule); ok {
					a.Index = j + 1
					p.Arms = append(p.Arms, a)
				}
			}
		}
	}
	// Exact above prefix, longer above shorter, a method, more fields; then as
	// they stand, which is the older route, its name, the order in it.
	slices.SortStableFunc(p.Arms, func(a, b snapshot.Arm) int {
		return cmp.Or(
			boolFirst(a.PathKind == model.PathExact, b.PathKind == model.PathExact),
			cmp.Compare(len(b.Path), len(a.Path)),
			boolFirst(a.Method != "", b.Method != ""),
			cmp.Compare(len(b.Headers), len(a.Headers)),
		)
	})
	return p
}

func boolFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// arm compiles a match; ok is false for one that can never hold.
func (c *compiler) arm(r *route, m *model.Match, rule *snapshot.Rule) (a snapshot.Arm, ok bool) {
	a = snapshot.Arm{PathKind: m.PathKind, Path: m.Path, Method: m.Method, Rule: rule}
	switch m.PathKind {
	case model.PathAny:
		a.Path = ""
	case model.PathExact, model.PathPrefix:
		if !strings.HasPrefix(m.Path, "/") {
			c.problem(r.object(), "%s: path %q can match nothing: it must begin with /", rule.Name, m.Path)
			return a, false
		}
		if m.PathKind == model.PathPrefix {
			a.Path = strings.TrimRight(m.Path, "/")
		}
	default:
		c.problem(r.object(), "%s: unknown kind of path match %d", rule.Name, m.PathKind)
		return a, false
	}
	for _, h := range m.Headers {
		h.Name = strings.ToLower(h.Name)
		if !token(h.Name) {
			c.problem(r.object(), "%s: %q is no field name, so that match can never hold", rule.Name, h.Name)
			return a, false
		}
		// Of one name twice the first counts (Gateway API HTTPHeaderMatch).
		if !slices.ContainsFunc(a.Headers, func(o model.HeaderMatch) bool { return o.Name == h.Name }) {
			a.Headers = append(a.Headers, h)
		}
	}
	return a, true
}

// rule compiles what a matching request gets. Whatever cannot be honoured
// becomes a 500 that says so, for all requests or for the share of a backend.
func (c *compiler) rule(r *route, i int, invalid string) *snapshot.Rule {
	in := &r.Rules[i]
	out := &snapshot.Rule{Name: fmt.Sprintf("%s rule %d", r.object(), i+1)}
	if in.Name != "" {
		out.Name += " (" + in.Name + ")"
	}
	refuse := func(format string, args ...any) string {
		return out.Name + " cannot be honoured: " + fmt.Sprintf(format, args...) + "\n"
	}
	if invalid != "" {
		out.Invalid = refuse("%s", invalid)
		return out
	}
	if in.Invalid != "" {
		c.problem(r.object(), "%s: %s; requests that pick it get 500", out.Name, in.Invalid)
		out.Invalid = refuse("%s", in.Invalid)
		return out
	}
	var why string
	if out.Request, out.Response, why = headerOps(in.Filters); why != "" {
		c.problem(r.object(), "%s: %s; requests that pick it get 500", out.Name, why)
		out.Invalid = refuse("%s", why)
		return out
	}
	for _, ref := range in.Backends {
		w := snapshot.Weighted{}
		why := ref.Invalid
		if why == "" {
			w.Backend, why = c.reference(ref)
		}
		if why == "" {
			w.Request, w.Response, why = headerOps(ref.Filters)
		}
		if why != "" {
			c.problem(r.object(), "%s: backendRef %s port %d: %s; its share of the requests gets 500", out.Name, ref.Service, ref.Port, why)
			w = snapshot.Weighted{Invalid: refuse("backendRef %s port %d: %s", ref.Service, ref.Port, why)}
		}
		out.WeightSum += uint64(ref.Weight)
		w.Upto = out.WeightSum
		out.Backends = append(out.Backends, w)
	}
	if len(out.Backends) > 0 && out.WeightSum == 0 {
		c.problem(r.object(), "%s: every backend has weight 0; requests that pick it get 500", out.Name)
		out.Invalid = refuse("every backend has weight 0")
	}
	return out
}

// reference resolves a backendRef by the Service's port map (contract 10.4).
func (c *compiler) reference(ref model.BackendRef) (*snapshot.Backend, string) {
	s := c.services[ref.Service]
	switch {
	case s == nil:
		return nil, "BackendNotFound: no such service; check the name, or wait for its pods"
	case s.broken != "":
		return nil, "BackendNotFound: the service is not served: " + s.broken
	case ref.Port == 0:
		return nil, "BackendNotFound: the reference has no port; name one of " + s.portList()
	}
	p := s.port(ref.Port)
	switch {
	case p == nil && len(s.ports) == 0 && s.generated():
		// Nothing says which ports there are: not known to be wrong, and nothing
		// can be delivered. A backend without endpoints answers 503 (10.4, grace).
		return c.backend(s, ref.Port, model.HTTP), ""
	case p == nil:
		return nil, "BackendNotFound: the service has no such port; it serves " + s.portList()
	case p.class != model.HTTP:
		return nil, fmt.Sprintf("UnsupportedProtocol: the port is %s; it serves %s", p.class, s.portList())
	}
	return c.backend(s, p.target, p.class), ""
}

// notForRules are fields that belong to the connection, the framing or the
// target: changing one would change what the message is, not what it says.
var notForRules = map[string]string{
	"host":              "host is the request's target",
	"connection":        "connection belongs to one hop",
	"keep-alive":        "keep-alive belongs to one hop",
	"proxy-connection":  "proxy-connection belongs to one hop",
	"te":                "te belongs to one hop",
	"trailer":           "trailer belongs to the framing",
	"transfer-encoding": "transfer-encoding belongs to the framing",
	"content-length":    "content-length belongs to the framing",
	"upgrade":           "upgrade belongs to one hop",
}

// headerOps compiles filters, one of a kind at most.
func headerOps(filters []model.Filter) (request, response *snapshot.HeaderOps, why string) {
	for _, f := range filters {
		ops := &snapshot.HeaderOps{}
		name := func(n string) []byte {
			n = strings.ToLower(n)
			if !token(n) {
				why = fmt.Sprintf("%q is no field name", n)
			} else if bad := notForRules[n]; bad != "" {
				why = "a filter cannot change a field of the message itself: " + bad
			}
			return []byte(n)
		}
		fields := func(in []model.HeaderValue) (out []httpmsg.Field) {
			for _, h := range in {
				if !httpmsg.ValidValue([]byte(h.Value)) {
					why = fmt.Sprintf("the value for %s holds a control character", h.Name)
				}
				out = append(out, httpmsg.Field{Name: name(h.Name), Value: []byte(h.Value)})
			}
			return out
		}
		ops.Set, ops.Add = fields(f.Set), fields(f.Add)
		for _, n := range f.Remove {
			ops.Remove = append(ops.Remove, name(n))
		}
		switch {
		case f.Kind == model.RequestHeaders && request == nil:
			request = ops
		case f.Kind == model.ResponseHeaders && response == nil:
			response = ops
		case f.Kind == model.RequestHeaders || f.Kind == model.ResponseHeaders:
			why = "two filters of one kind: put their changes into one"
		default:
			why = fmt.Sprintf("unknown kind of filter %d", f.Kind)
		}
		if why != "" {
			return nil, nil, why
		}
	}
	return request, response, ""
}

func token(s string) bool {
	for i := range len(s) {
		if httpmsg.Lower[s[i]] == 0 {
			return false
		}
	}
	return s != ""
}
