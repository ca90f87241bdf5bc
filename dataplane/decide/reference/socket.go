package reference

import (
	"strings"

	"aether/dataplane/model"
)

// socketOf is contract 1.7 and 10.8: the path of the Unix socket to which a pod's ports are
// delivered, "" for TCP. The annotation beats the policy, of policies the first by name counts,
// and whatever is wrong with the request means TCP.
func (w *world) socketOf(pod *model.Workload) string {
	request := pod.UDSSocket
	if request == "" {
		first := ""
		for _, p := range w.m.Policies {
			if p.Service.Namespace == pod.Namespace && p.Service.Name == pod.Account && (first == "" || p.Name < first) {
				first, request = p.Name, p.UDSSocket
			}
		}
	}
	clean := func(s string) bool { return s != "" && s != "." && s != ".." && !strings.Contains(s, "/") }
	halves := strings.Split(request, "/")
	if len(halves) != 2 || !clean(halves[0]) || !clean(halves[1]) || !clean(pod.UID) {
		return ""
	}
	for _, other := range w.m.Workloads {
		if other.UID == pod.UID && (other.Namespace != pod.Namespace || other.Name != pod.Name) {
			return "" // two pods of one UID
		}
	}
	if pod.Volumes != nil {
		var ours []string
		for _, v := range pod.Volumes {
			if v.Driver == "csi.aether.io" {
				ours = append(ours, v.Name)
			}
		}
		if len(ours) != 1 || ours[0] != halves[0] {
			return ""
		}
	}
	path := "/run/aether/uds/" + pod.UID + "/" + halves[1]
	if len(path) > 107 {
		return ""
	}
	return path
}
