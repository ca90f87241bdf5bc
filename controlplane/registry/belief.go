package registry

import (
	"fmt"
	"net/netip"
	"strings"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/mtls/spiffeid"
)

// The words in an identity's form that stand for a name.
const (
	namespaceWord = "{namespace}"
	nodeWord      = "{node}"
)

// ownForm is that of the identities that every service's rows may name.
const ownForm = "/ns/" + namespaceWord + "/*"

// IdentityFault says why a valid row is not believed of its pod although its form is right
// (decision 051), as RowFault does. A row may name an identity of its service's namespace in
// trustDomain, and those of the forms in also (CheckIdentityForm); pins follow what it names.
func IdentityFault(service model.ServiceName, trustDomain string, e *registrypb.ServiceEndpoint, also ...string) (Fault, string) {
	id := e.GetSpiffeId()
	if id == "" || isOf(id, trustDomain, service.Namespace, ownForm) {
		return NoFault, ""
	}
	for _, form := range also {
		if isOf(id, trustDomain, service.Namespace, form) {
			return NoFault, ""
		}
	}
	return ForeignIdentity, fmt.Sprintf("spiffe_id %.256q is none of namespace %s in trust domain %s: nodes and registrars take others by --allow-spiffe-id", id, service.Namespace, trustDomain)
}

// isOf reports whether id is of a form, in which namespaceWord stands for namespace.
func isOf(id, trustDomain, namespace, form string) bool {
	if strings.HasPrefix(form, "/") {
		form = "spiffe://" + trustDomain + form
	}
	form, below := strings.CutSuffix(form, "*")
	form = strings.ReplaceAll(form, namespaceWord, namespace)
	if below {
		return len(id) > len(form) && strings.HasPrefix(id, form)
	}
	return id == form
}

// CheckIdentityForm says what is wrong with a form of identities: a SPIFFE ID, or its path
// in the mesh's trust domain. "{namespace}" in it stands for the service's namespace, and
// "/*" at its end for all below.
func CheckIdentityForm(form string) error {
	return checkForm(form, namespaceWord, true)
}

func checkForm(form, word string, below bool) error {
	id := strings.ReplaceAll(form, word, "x")
	if strings.HasPrefix(id, "/") {
		id = "spiffe://x" + id
	}
	if below {
		id = strings.TrimSuffix(id, "/*")
	}
	if x, err := spiffeid.Parse(id); err != nil {
		return fmt.Errorf("%.128q is neither a SPIFFE ID nor the path of one, in which %s may stand: %w", form, word, err)
	} else if x.Path() == "" {
		return fmt.Errorf("%.128q names a whole trust domain: write a path below it, as spiffe://%s/ns/{namespace}/*", form, x.TrustDomain())
	}
	return nil
}

// CheckNodeForm says what is wrong with a form of nodes' identities: a SPIFFE ID, or its
// path in the mesh's trust domain, in which "{node}" stands once for the node's name.
func CheckNodeForm(form string) error {
	if strings.Count(form, nodeWord) != 1 {
		return fmt.Errorf("%.128q: %s is to stand in it once", form, nodeWord)
	}
	return checkForm(form, nodeWord, false)
}

// NamesNode reports whether an entry is a form of nodes' identities.
func NamesNode(form string) bool { return strings.Contains(form, nodeWord) }

// NodeID is the identity of a node by its form.
func NodeID(form, trustDomain, node string) (spiffeid.ID, error) {
	if strings.HasPrefix(form, "/") {
		form = "spiffe://" + trustDomain + form
	}
	id, err := spiffeid.Parse(strings.ReplaceAll(form, nodeWord, node))
	if err != nil {
		return spiffeid.ID{}, err
	}
	if got, ok := NodeOf(id, trustDomain, form); !ok || got != node { // a name with a / in it
		return spiffeid.ID{}, fmt.Errorf("the node's name %.128q cannot be part of a SPIFFE ID", node)
	}
	return id, nil
}

// NodeOf is the node that an identity of this form is of.
func NodeOf(id spiffeid.ID, trustDomain, form string) (node string, ok bool) {
	if strings.HasPrefix(form, "/") {
		form = "spiffe://" + trustDomain + form
	}
	before, after, _ := strings.Cut(form, nodeWord)
	text := id.String()
	if len(text) <= len(before)+len(after) || !strings.HasPrefix(text, before) || !strings.HasSuffix(text, after) {
		return "", false
	}
	node = text[len(before) : len(text)-len(after)]
	return node, !strings.Contains(node, "/")
}

// noPods says why no pod can have an address; "": one may. Two texts of one address are
// judged alike: those of IPv4 in IPv6 are IPv4's.
func noPods(text string) string {
	ip, err := netip.ParseAddr(text)
	if err != nil || ip.Zone() != "" {
		return "is no address of a pod"
	}
	switch ip = ip.Unmap(); {
	case ip.IsLinkLocalUnicast():
		return "is link-local: it means another host wherever it is dialled"
	case ip.IsLoopback():
		return "is of the loopback: it means whoever dials it"
	case ip.IsMulticast():
		return "is of a group, not of a pod"
	case ip.IsUnspecified(), ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}), thisNetwork.Contains(ip), embedded.Contains(ip):
		return "is no address of a pod"
	}
	return ""
}

var (
	thisNetwork = netip.MustParsePrefix("0.0.0.0/8") // RFC 791: a source only
	embedded    = netip.MustParsePrefix("::/96")     // RFC 4291 2.5.5.1: IPv4 in IPv6, given up
)
