package decide

import (
	"fmt"
	"net/netip"
	"strings"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Step is one thing that was looked at, in words.
type Step struct{ Text string }

// Trace records how a verdict came about. It has one method for each step, and
// every method does nothing on a nil Trace: the steps call them without asking,
// and nothing is formatted or allocated on the ordinary path. A Trace is not safe
// for concurrent use.
type Trace struct{ Steps []Step }

// add records a step; t is not nil. It is not inlined, so that the methods which call it are: on the
// ordinary path a step costs one comparison. What is too large for that has its text in a
// method of its own, recordX for X.
//
//go:noinline
func (t *Trace) add(format string, args ...any) {
	t.Steps = append(t.Steps, Step{fmt.Sprintf(format, args...)})
}

// Steps of connections (contract 4.2).

func (t *Trace) connection(s *snapshot.Snapshot, f *model.Flow) {
	if t != nil {
		t.recordConnection(s, f)
	}
}

func (t *Trace) recordConnection(s *snapshot.Snapshot, f *model.Flow) {
	t.add("snapshot %d: connection %s", s.Version(), f.String())
}

func (t *Trace) capture(pod *snapshot.Workload) {
	if t != nil {
		t.recordCapture(pod)
	}
}

func (t *Trace) recordCapture(pod *snapshot.Workload) {
	switch {
	case pod == nil:
		t.add("no such pod on this node: capture is taken to be redirect-all")
	case pod.Capture.RedirectAll:
		t.add("%s: captured with redirect-all", pod.Rule)
	default:
		t.add("%s: captured scoped", pod.Rule)
	}
}

func (t *Trace) foreignAddress(s *snapshot.Snapshot, addr netip.Addr) {
	if t != nil {
		t.recordForeignAddress(s, addr)
	}
}

func (t *Trace) recordForeignAddress(s *snapshot.Snapshot, addr netip.Addr) {
	if n, ok := s.Outside(addr); ok {
		t.add("%s is the address of Service %s, which has no pods in the mesh: none has the ServiceAccount %s (contract 1.1)", addr, n, n.Name)
	} else {
		t.add("%s is the address of no service", addr)
	}
}

func (t *Trace) unroutedAddress(addr netip.Addr, svc *snapshot.Service) {
	if t != nil {
		t.add("%s is %s's, a user's Service that no route names: its address is not the mesh's (contract 4.9)", addr, svc.Rule)
	}
}

func (t *Trace) awaitedAddress(addr netip.Addr, svc *snapshot.Service) {
	if t != nil {
		t.add("%s is %s's (%s), which is in the mesh's catalog and whose rows are not here yet: nothing is read before they are (contract 4.6)", addr, svc.Rule, svc.Kind)
	}
}

func (t *Trace) serviceAddress(addr netip.Addr, svc *snapshot.Service) {
	if t != nil {
		t.add("%s is %s's (%s)", addr, svc.Rule, svc.Kind)
	}
}

func (t *Trace) httpPort(port uint16) {
	if t != nil {
		t.add("%d is an HTTP port of it", port)
	}
}

func (t *Trace) noServicePort(port uint16) {
	if t != nil {
		t.add("%d is no TCP or HTTP port of it", port)
	}
}

func (t *Trace) rawTCPPort() {
	if t != nil {
		t.add("the port is raw TCP: what the bytes say does not matter")
	}
}

func (t *Trace) tlsRoutes() {
	if t != nil {
		t.add("TLSRoutes are in force on the port")
	}
}

// serverName names the arm that the server name is in; nil: none.
func (t *Trace) serverName(name string, a *snapshot.SNIMatch) {
	switch {
	case t == nil:
	case a == nil:
		t.add("server name %q is in no TLSRoute of it", name)
	default:
		t.add("server name %q is %s's", name, a.Split.Name)
	}
}

func (t *Trace) httpEndpoint(addr netip.Addr, b *snapshot.Backend, port uint16) {
	if t != nil {
		t.add("%s is a pod of %s, which declares %d HTTP", addr, b.Service, port)
	}
}

func (t *Trace) invalidSplit(sp *snapshot.Split) {
	if t != nil {
		t.add("%s cannot be honoured: %s", sp.Name, sp.Invalid)
	}
}

func (t *Trace) splitBackend(sp *snapshot.Split, b *snapshot.Backend) {
	if t != nil {
		t.add("%s: %s drawn out of %d backends by weight", sp.Name, b.Name, len(sp.Backends))
	}
}

func (t *Trace) undeclaredPort(pod *snapshot.Workload, port uint16) {
	if t != nil {
		t.add("%s declares no HTTP or TCP port %d; it declares %s", pod.Rule, port, podPortsText(pod))
	}
}

func (t *Trace) unknownPod() {
	if t != nil {
		t.add("no such pod on this node")
	}
}

// socket says where the application takes the port; to is nil where that is not the pod's Unix socket.
func (t *Trace) socket(pod *snapshot.Workload, to *model.Socket) {
	switch {
	case t == nil || pod.Socket == nil:
	case to == nil:
		t.add("%s takes requests at its Unix socket %s/%s/%s, where an inbound filter judges them: raw TCP goes to 127.0.0.1", pod.Rule, pod.Socket.Dir, pod.Socket.Pod, pod.Socket.File)
	default:
		t.add("%s takes all its ports at its Unix socket %s/%s/%s", pod.Rule, to.Dir, to.Pod, to.File)
	}
}

// Steps of authorities (contract 4.3, 4.5), of connections and of requests.

func (t *Trace) hostWithoutPort(host string, svc *snapshot.Service) {
	if t != nil {
		t.add("authority %q names %s, with a port that is none", host, svc.Rule)
	}
}

func (t *Trace) hostOwned(host string, svc *snapshot.Service) {
	if t != nil {
		t.add("authority %q names %s", host, svc.Rule)
	}
}

func (t *Trace) hostForeign(host string, n *snapshot.Named, dialled uint16) {
	if t != nil {
		t.recordForeign(host, n, dialled)
	}
}

func (t *Trace) recordForeign(host string, n *snapshot.Named, dialled uint16) {
	t.add("authority %q: %s", host, foreignText(n, dialled))
}

func (t *Trace) request(r *httpmsg.Head) {
	if t != nil {
		t.recordRequest(r)
	}
}

func (t *Trace) recordRequest(r *httpmsg.Head) { t.add("request %s", model.RequestString(r)) }

func (t *Trace) authorityOwned(authority []byte, svc *snapshot.Service) {
	if t != nil {
		t.add("authority %q names %s (%s)", authority, svc.Rule, svc.Kind)
	}
}

func (t *Trace) authorityForeign(authority []byte, n *snapshot.Named, dialled uint16) {
	if t != nil {
		t.recordForeign(string(authority), n, dialled)
	}
}

func (t *Trace) dialledOwner(owner *snapshot.Service, authority []byte) {
	if t != nil {
		t.add("the dialled address is %s's (%s): it is meant, whatever the authority %q says (routeSemantics GatewayAPI)", owner.Rule, owner.Kind, authority)
	}
}

func (t *Trace) unknownPorts(svc *snapshot.Service) {
	if t != nil {
		t.add("%s has no pod here, and nothing says which ports it has", svc.Rule)
	}
}

func (t *Trace) wrongPort(s *snapshot.Snapshot, svc *snapshot.Service, caller string, why Reason, port, named uint16) {
	if t != nil {
		t.recordWrongPort(s, svc, caller, why, port, named)
	}
}

func (t *Trace) recordWrongPort(s *snapshot.Snapshot, svc *snapshot.Service, caller string, why Reason, port, named uint16) {
	t.add("%s", refusalText(why, port, named))
	t.add("%s", wouldWork(s, svc, caller))
}

// similarNames says which services a name that is none could have meant: those of the same first label.
func (t *Trace) similarNames(s *snapshot.Snapshot, authority []byte, caller string) {
	if t != nil {
		t.recordSimilarNames(s, authority, caller)
	}
}

func (t *Trace) recordSimilarNames(s *snapshot.Snapshot, authority []byte, caller string) {
	host, _, _ := strings.Cut(string(authority), ":")
	label, _, _ := strings.Cut(strings.ToLower(host), ".")
	n := 0
	for _, svc := range s.Services() {
		if svc.Name.Name != label {
			continue
		}
		if n++; n > maxSimilar {
			t.add("and more services called %s", label)
			return
		}
		t.add("%s is there: %s", svc.Rule, wouldWork(s, svc, caller))
	}
	if n == 0 {
		t.add("no service is called %q in any namespace", label)
	}
}

// Steps of rules (contract 10.3, 10.7).

func (t *Trace) consumerRoutes(namespace string) {
	if t != nil {
		t.add("routes of the caller's own namespace %s are attached to the port: they stand in the place of the producer's (GEP-1426)", namespace)
	}
}

func (t *Trace) longPath(a *snapshot.Match, path []byte, most int) {
	if t != nil {
		t.add("%s: the path has %d bytes, more than the %d that an expression is run on", armText(a), len(path), most)
	}
}

func (t *Trace) otherPath(a *snapshot.Match, path []byte) {
	if t != nil {
		t.add("%s: path %q is not %s", armText(a), path, pathText(a))
	}
}

func (t *Trace) otherMethod(a *snapshot.Match, method []byte) {
	if t != nil {
		t.add("%s: method %s is not %s", armText(a), method, a.Method)
	}
}

func (t *Trace) longNames(a *snapshot.Match) {
	if t != nil {
		t.add("%s: %s has more than the %d bytes that are looked at", armText(a), hdrRequestHeaders, maxNames)
	}
}

func (t *Trace) longField(a *snapshot.Match, h *snapshot.ValueMatch, most int) {
	if t != nil {
		t.add("%s: field %s has more than the %d bytes that an expression is run on", armText(a), h.Name, most)
	}
}

func (t *Trace) otherField(a *snapshot.Match, h *snapshot.ValueMatch) {
	if t != nil {
		t.add("%s: field %s is not %s", armText(a), h.Name, valueText(h))
	}
}

func (t *Trace) longQuery(a *snapshot.Match) {
	if t != nil {
		t.add("%s: the query has more than %d parameters", armText(a), maxParameters)
	}
}

func (t *Trace) longParameter(a *snapshot.Match, q *snapshot.ValueMatch, most int) {
	if t != nil {
		t.add("%s: query parameter %s has more than the %d bytes that an expression is run on", armText(a), q.Name, most)
	}
}

func (t *Trace) otherParameter(a *snapshot.Match, q *snapshot.ValueMatch) {
	if t != nil {
		t.add("%s: query parameter %s is not %s", armText(a), q.Name, valueText(q))
	}
}

func (t *Trace) armMatches(a *snapshot.Match) {
	if t != nil {
		t.recordMatch(a)
	}
}

func (t *Trace) recordMatch(a *snapshot.Match) { t.add("%s: matches", armText(a)) }

// noRule says what no rule means; strict: nothing may have the request.
func (t *Trace) noRule(strict bool) {
	switch {
	case t == nil:
	case strict:
		t.add("no rule matches, and with routes attached that is a 404 (routeSemantics GatewayAPI)")
	default:
		t.add("no rule matches: the port itself")
	}
}

func (t *Trace) deepEscapes(path []byte) {
	if t != nil {
		t.add("path %q holds escapes more than %d deep", path, maxRounds)
	}
}

func (t *Trace) alias(path, norm []byte) {
	if t != nil {
		t.add("path %q may be read as %q: which rule is that?", path, norm)
	}
}

func (t *Trace) aliasChoosesOther(chosen, other *snapshot.Rule) {
	if t != nil {
		t.add("the two spellings choose different rules (%s, %s), and policy is in force on one of them", ruleText(chosen), ruleText(other))
	}
}

// thirdReading says where policy is in force: "port" or "pod".
func (t *Trace) thirdReading(path []byte, where string) {
	if t != nil {
		t.add("path %q holds an element \"..\", a slash hidden behind \";\" or a NUL, which applications read in different ways, and policy is in force on the %s", path, where)
	}
}

func (t *Trace) aliasJudgedOtherwise(f *snapshot.RBAC, path, norm []byte) {
	if t != nil {
		t.add("%s allows one of the spellings %q and %q only", f.Name, path, norm)
	}
}

func (t *Trace) rbac(f *snapshot.RBAC, held *model.Policy, allowed bool, peer string) {
	if t != nil {
		t.add("%s: %s", f.Name, rbacText(f, held, allowed, peer))
	}
}

// authz names the filter of p that asks the authorization service, if it has one.
func (t *Trace) authz(p *snapshot.FilterChain) {
	if t != nil && p.Authz != nil {
		t.add("%s: the authorization service is asked", p.Authz.Name)
	}
}

// Steps of backends and endpoints (contract 5.10, 10.4).

func (t *Trace) noBackend() {
	if t != nil {
		t.add("the rule has no backendRefs, and with routes attached that is a 500 (routeSemantics GatewayAPI)")
	}
}

func (t *Trace) invalidBackend(b *snapshot.Weighted) {
	if t != nil {
		t.add("the share that was drawn has no valid backend: %s", strings.TrimSpace(b.Invalid))
	}
}

func (t *Trace) drawnBackend(b *snapshot.Weighted, count int) {
	if t != nil && count > 1 {
		t.add("%s drawn out of %d backends by weight", b.Backend.Name, count)
	}
}

func (t *Trace) longEditedQuery() {
	if t != nil {
		t.add("the query has more than %d parameters, and filters change it", maxParameters)
	}
}

func (t *Trace) awaitedRows(name model.ServiceName) {
	if t != nil {
		t.add("%s is in the mesh's catalog and its rows are not here yet (contract 4.6)", name)
	}
}

func (t *Trace) noHealthyEndpoint(b *snapshot.Backend, set *snapshot.EndpointSet) {
	if t != nil {
		t.add("%s has no healthy endpoint among %d", b.Name, set.Len())
	}
}

func (t *Trace) endpoints(b *snapshot.Backend, set *snapshot.EndpointSet) {
	if t != nil {
		t.add("%s: %d endpoints, SNI %s", b.Name, set.Len(), b.SNI)
	}
}

func (t *Trace) pinAndSubset() {
	if t != nil {
		t.add("a pin and a subset together select nothing: balanced over all (contract 5.10)")
	}
}

func (t *Trace) pinned(e *snapshot.Endpoint, ip, pod []byte) {
	if t != nil {
		t.add("pinned to %s", pinText(e, ip, pod))
	}
}

func (t *Trace) manyKeys(want []snapshot.Want) {
	if t != nil {
		t.add("%s, and more keys than %d: no endpoint is that", wantText(want), maxKeys)
	}
}

func (t *Trace) noSuchSubset(want []snapshot.Want) {
	if t != nil {
		t.add("%s: these keys do not combine: balanced over all (contract 5.10)", wantText(want))
	}
}

func (t *Trace) subset(want []snapshot.Want, sub, set *snapshot.EndpointSet) {
	if t != nil {
		t.add("%s: %d of %d endpoints", wantText(want), sub.Len(), set.Len())
	}
}

// inProcess says which of the endpoints that a request may go to are met in process.
func (t *Trace) inProcess(s *snapshot.Snapshot, v *Verdict) {
	if t == nil {
		return
	}
	all := []*snapshot.Endpoint{v.Pinned}
	if v.Pinned == nil {
		all = v.Set.All()
	}
	var here []string
	for _, e := range all {
		if w := s.Near(e); w != nil {
			here = append(here, w.Pod+" ("+e.Addr.Addr().String()+")")
		}
	}
	if len(here) > 0 {
		t.add("in process, not over mTLS (sameNode inProcess): %s of this node", strings.Join(here, ", "))
	}
}
