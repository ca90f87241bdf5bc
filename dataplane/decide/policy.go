package decide

import (
	"iter"
	"math/bits"
	"strings"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Audited is what the filters in mode AUDIT that were asked make of a request. They decide nothing.
type Audited struct {
	Pipe   *snapshot.FilterChain // whose filters these are; nil: none was asked
	Asked  uint64                // bit i: Pipe.RBAC[i] was asked; the first 64 are told apart
	Denied uint64                // and would have denied the request
	// By is the policy that held in the first that would have; nil: it allows, and none did.
	By *model.Policy
}

// Names are those of the first filter that would have denied the request, and of its policy that held; "": none.
func (a *Audited) Names() (filter, policy string) {
	if a.Denied == 0 {
		return "", ""
	}
	if a.By != nil {
		policy = a.By.Name
	}
	return a.Pipe.RBAC[bits.TrailingZeros64(a.Denied)].Name, policy
}

// All are the filters that were asked, in order, and whether each would have denied the request.
func (a *Audited) All() iter.Seq2[*snapshot.RBAC, bool] {
	return func(yield func(*snapshot.RBAC, bool) bool) {
		for m := a.Asked; m != 0; m &= m - 1 {
			i := bits.TrailingZeros64(m)
			if !yield(&a.Pipe.RBAC[i], a.Denied>>i&1 != 0) {
				return
			}
		}
	}
}

// denied is the first filter of p that denies a request, or nil, and what those in mode AUDIT make of it goes to a.
func (a *Audited) denied(p *snapshot.FilterChain, peer string, method, path []byte, t *Trace) *snapshot.RBAC {
	d := denies(p.RBAC, peer, method, path, t, a)
	if a.Asked != 0 {
		a.Pipe = p
	}
	return d
}

// denies is the first filter that does not allow a request, or nil (contract 10.7). An audit
// filter denies nothing; a trace tells what it would have done, and so does a unless it is nil. peer is the verified
// caller: of the hop at the destination, the pod itself at the source; "": nobody is verified.
func denies(list []snapshot.RBAC, peer string, method, path []byte, t *Trace, a *Audited) *snapshot.RBAC {
	for i := range list {
		f := &list[i]
		held := holds(f.Policies, peer, f.Deny, method, path)
		allowed := (held != nil) != f.Deny
		t.rbac(f, held, allowed, peer)
		switch {
		case f.Audit && a != nil && i < 64:
			a.Asked |= 1 << i
			if !allowed {
				if a.Denied == 0 {
					a.By = held
				}
				a.Denied |= 1 << i
			}
		case !allowed && !f.Audit:
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
