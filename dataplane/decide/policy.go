package decide

import (
	"strings"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// denies is the first filter that does not allow a request, or nil (contract 10.7). An audit
// filter denies nothing; a trace says what it would have done. peer is the verified
// caller: of the hop at the destination, the pod itself at the source; "": nobody is verified.
func denies(list []snapshot.RBAC, peer string, method, path []byte, t *Trace) *snapshot.RBAC {
	for i := range list {
		f := &list[i]
		held := holds(f.Policies, peer, f.Deny, method, path)
		allowed := (held != nil) != f.Deny
		if t != nil {
			t.add("%s: %s", f.Name, rbacText(f, held, allowed, peer))
		}
		if !allowed && !f.Audit {
			return f
		}
	}
	return nil
}

// holds is the first policy that holds, or nil. Of a caller whom nobody knows every
// policy that denies may be meant, and none that allows.
func holds(list []model.Policy, peer string, deny bool, method, path []byte) *model.Policy {
	for i := range list {
		p := &list[i]
		if (principal(p.Principals, peer) || deny && peer == "") && permitted(p.Permissions, method, path) {
			return p
		}
	}
	return nil
}

func principal(list []model.Principal, peer string) bool {
	if peer == "" {
		return false // nobody is verified
	}
	for i := range list {
		p := &list[i]
		if p.SPIFFEID != "" && p.SPIFFEID == peer || p.Namespace != "" && namespaceOf(peer) == p.Namespace {
			return true
		}
	}
	return false
}

// namespaceOf is the namespace of "spiffe://<trust domain>/ns/<namespace>/sa/<account>";
// "": the identity has another form. Trust domain and account are not empty.
func namespaceOf(id string) string {
	rest, ok := strings.CutPrefix(id, "spiffe://")
	if !ok {
		return ""
	}
	domain, rest, _ := strings.Cut(rest, "/")
	rest, ok = strings.CutPrefix(rest, "ns/")
	if !ok || domain == "" {
		return ""
	}
	ns, rest, _ := strings.Cut(rest, "/")
	if account, ok := strings.CutPrefix(rest, "sa/"); !ok || account == "" {
		return ""
	}
	return ns
}

func permitted(list []model.Permission, method, path []byte) bool {
	if len(list) == 0 {
		return true
	}
	for i := range list {
		p := &list[i]
		if p.Method != "" && p.Method == string(method) ||
			p.PathPrefix != "" && len(path) >= len(p.PathPrefix) && string(path[:len(p.PathPrefix)]) == p.PathPrefix {
			return true
		}
	}
	return false
}
