package decide

import (
	"fmt"
	"strconv"
	"strings"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// What stands here makes words for traces; nothing of it is on the ordinary path.

// armText names an arm.
func armText(a *snapshot.Match) string {
	if a.Index == 0 {
		return a.Rule.Name
	}
	return a.Rule.Name + " match " + strconv.Itoa(a.Index)
}

// pathText is what an arm asks of the path.
func pathText(a *snapshot.Match) string {
	if g := a.GRPC; g != nil {
		text := func(name string, re fmt.Stringer, has bool) string {
			switch {
			case has:
				return "like " + re.String()
			case name == "":
				return "any"
			}
			return strconv.Quote(name)
		}
		return "a call of service " + text(g.Service, g.ServiceRegex, g.ServiceRegex != nil) + ", method " + text(g.Method, g.MethodRegex, g.MethodRegex != nil)
	}
	switch a.PathKind {
	case model.PathExact:
		return "exactly " + strconv.Quote(a.Path)
	case model.PathRegex:
		return "like " + strconv.Quote(a.Path)
	}
	return "below " + strconv.Quote(a.Path)
}

// valueText is what a condition asks of a value.
func valueText(w *snapshot.ValueMatch) string {
	if w.Regex != nil {
		return "like " + strconv.Quote(w.Value)
	}
	return strconv.Quote(w.Value)
}

func ruleText(r *snapshot.Rule) string {
	switch {
	case r == nil:
		return "none"
	case r.Name == "":
		return "the port itself"
	}
	return r.Name
}

// rbacText says what a filter makes of a request.
func rbacText(f *snapshot.RBAC, held *model.Policy, allowed bool, peer string) string {
	who := peer
	if who == "" {
		who = "a caller that is not known here"
	}
	out := "no policy holds for " + who
	if held != nil {
		out = "policy " + held.Name + " holds for " + who
	}
	verb := map[bool]string{true: "allows", false: "denies"}[allowed]
	if f.Audit {
		return out + ": it " + verb + ", were it not for audit only"
	}
	return out + ": it " + verb
}

func wantText(want []snapshot.Want) string {
	var out []string
	for _, w := range want {
		out = append(out, fmt.Sprintf("%s=%q", w.Key, w.Value))
	}
	return "subset " + strings.Join(out, " and ")
}

func pinText(e *snapshot.Endpoint, ip, pod []byte) string {
	out := "pinned to"
	if len(ip) > 0 {
		out += fmt.Sprintf(" address %q", ip)
	}
	if len(pod) > 0 {
		out += fmt.Sprintf(" pod %q", pod)
	}
	if e == nil {
		return out + ": no healthy endpoint is that, and none other will do (contract 5.10)"
	}
	return out + ": " + e.Pod + " at " + e.Addr.String()
}

// refusalText says what of the ports is wrong.
func refusalText(why Reason, port, named uint16) string {
	switch why {
	case PortMismatch:
		return fmt.Sprintf("dialled %d, an HTTP port of it, and the authority names %d", port, named)
	case PortRequired:
		return "the authority names no port, which means 80 here, and that is no HTTP port of it"
	case PortNotHTTP:
		return fmt.Sprintf("the authority asks for port %d, which is not HTTP", port)
	}
	if named == port && named != 0 {
		return fmt.Sprintf("port %d is no HTTP port of it", port)
	}
	return fmt.Sprintf("the port asked for, %d, is no HTTP port of it", port)
}

// wouldWork says which names and ports of a service a caller could have used.
func wouldWork(s *snapshot.Snapshot, svc *snapshot.Service, caller string) string {
	ports := portsText(svc.Ports)
	if svc.Kind == snapshot.MeshOnly && len(svc.PodPorts) > 0 {
		ports += "; dialled and captured: " + portsText(svc.PodPorts)
	}
	return "what would work: " + strings.Join(namesOf(s, svc, caller), ", ") + " with port " + ports
}

// namesOf are the authorities that mean a service to a caller (contract 4.5).
func namesOf(s *snapshot.Snapshot, svc *snapshot.Service, caller string) []string {
	full := svc.Name.Name + "." + svc.Name.Namespace
	out := []string{full + "." + s.Domain()}
	if svc.Kubernetes {
		out = append(out, full+".svc.cluster.local", full+".svc", full)
		if caller == svc.Name.Namespace {
			out = append(out, svc.Name.Name)
		}
	}
	return out
}

func portsText(ports []snapshot.Port) string {
	var out []string
	for i := range ports {
		out = append(out, fmt.Sprintf("%d (%s)", ports[i].Number, ports[i].Class))
	}
	if len(out) == 0 {
		return "none: it declares none"
	}
	return strings.Join(out, ", ")
}

func podPortsText(pod *snapshot.Workload) string {
	var out []string
	for _, p := range pod.Ports {
		out = append(out, fmt.Sprintf("%d (%s)", p.Number, p.Class))
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ", ")
}

// maxSimilar bounds how many services a trace proposes.
const maxSimilar = 5

// foreignText says why an authority is no mesh name on a captured dial.
func foreignText(n *snapshot.Named, dialled uint16) string {
	switch {
	case n.Service != nil:
		return "names " + n.Service.Rule + ", a user's Service that no route names, by another port than its pods' HTTP port dialled"
	case !n.WellFormed:
		return "no host name"
	case n.Below:
		return "below the mesh domain, and there is no such service"
	}
	return "names no service for this caller"
}
