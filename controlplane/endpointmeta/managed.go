package endpointmeta

import (
	"slices"
	"strings"
)

// LabelManaged on a pod puts it in the mesh; exactly "true" does (contract 1.2).
const LabelManaged = "aether.io/managed"

// ignoredNamespaces are never in the mesh, compared in lower case (contract 1.2).
var ignoredNamespaces = []string{"kube-system", "aether-system", "spire-mgmt", "spire-server", "spire-system"}

// IgnoredNamespace reports whether nothing of the namespace is ever in the mesh.
func IgnoredNamespace(namespace string) bool {
	return slices.Contains(ignoredNamespaces, strings.ToLower(namespace))
}

// Ignorable reports whether a pod is none of the mesh's (contract 1.2): its namespace
// is ignored, it is not labelled managed, or it has no address.
func Ignorable(namespace string, labels map[string]string, addresses int) bool {
	return IgnoredNamespace(namespace) || labels[LabelManaged] != "true" || addresses == 0
}
