package endpointmeta

import "testing"

// TestIgnorable: contract 1.2.
func TestIgnorable(t *testing.T) {
	managed := map[string]string{LabelManaged: "true"}
	for _, tt := range []struct {
		namespace string
		labels    map[string]string
		addresses int
		want      bool
	}{
		{"shop", managed, 1, false},
		{"shop", managed, 0, true},
		{"shop", nil, 1, true},
		{"shop", map[string]string{LabelManaged: "True"}, 1, true},
		{"shop", map[string]string{LabelManaged: "false"}, 1, true},
		{"kube-system", managed, 1, true},
		{"Aether-System", managed, 1, true},
		{"spire-mgmt", managed, 1, true},
		{"spire-server", managed, 1, true},
		{"spire-system", managed, 1, true},
		{"spire", managed, 1, false},
	} {
		if got := Ignorable(tt.namespace, tt.labels, tt.addresses); got != tt.want {
			t.Errorf("%s %v %d: %t", tt.namespace, tt.labels, tt.addresses, got)
		}
	}
}
