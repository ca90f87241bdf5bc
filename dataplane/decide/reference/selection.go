package reference

import (
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strings"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// usable endpoints take new work (5.5).
func usable(of []endpoint) (out []endpoint) {
	for _, e := range of {
		if healthy(e.Health) && e.Weight > 0 {
			out = append(out, e)
		}
	}
	return out
}

func podNames(of []endpoint) (out []string) {
	for _, e := range of {
		out = append(out, fmt.Sprintf("%s@%d", e.Pod, e.priority))
	}
	sort.Strings(out)
	return out
}

// want is one condition of a selection.
type want struct{ key, value string }

// routable keys of metadata select (1.3).
func routable(k string) bool {
	return labelForm.MatchString(k) && k != "ip" && k != "pod" && k != "cluster" && k != "namespace"
}

// subsetKeys of some rows, ascending.
func subsetKeys(rows []model.Endpoint) (out []string) {
	for _, e := range rows {
		for k := range e.Metadata {
			if routable(k) && !slices.Contains(out, k) {
				out = append(out, k)
			}
		}
	}
	sort.Strings(out)
	return out
}

// first is the first line of a field; an empty one counts as absent.
func first(r *httpmsg.Head, name string) string {
	for _, f := range r.Fields {
		if string(f.Name) == name {
			return string(f.Value)
		}
	}
	return ""
}

// selection is contract 5.10: which of a backend's endpoints the request may go to.
func (w *world) selection(r *httpmsg.Head, by []selector, svc *service, pods []endpoint) []endpoint {
	wants := w.wants(r, by)
	ip, pod := first(r, "x-aether-ip"), first(r, "x-aether-pod")
	pinned := ip != "" || pod != ""
	switch {
	case pinned && len(wants) > 0: // together they select nothing
		return usable(pods)
	case pinned:
		return pinnedTo(ip, pod, pods)
	case len(wants) == 0 || !combine(wants, svc):
		return usable(pods)
	}
	var out []endpoint
	for _, e := range pods {
		if !slices.ContainsFunc(wants, func(x want) bool {
			v, ok := e.Metadata[x.key]
			return !ok || v != x.value
		}) {
			out = append(out, e)
		}
	}
	return usable(out)
}

// pinnedTo is pin or fail: whatever its weight, but not when it is unhealthy.
func pinnedTo(ip, pod string, pods []endpoint) (out []endpoint) {
	addr, err := netip.ParseAddr(ip)
	for _, e := range pods {
		if ip != "" && (err != nil || e.IP != addr.Unmap()) || pod != "" && e.Pod != pod || !healthy(e.Health) {
			continue
		}
		out = append(out, e)
	}
	return out
}

// wants are the subset conditions of a request, of known keys, each key once: the
// headers', then headerToMetadata's.
func (w *world) wants(r *httpmsg.Head, by []selector) (out []want) {
	known := subsetKeys(w.rows)
	add := func(key, value string) {
		if slices.Contains(known, key) && !slices.ContainsFunc(out, func(x want) bool { return x.key == key }) {
			out = append(out, want{key, value})
		}
	}
	for _, f := range r.Fields {
		name := string(f.Name)
		if key, ok := strings.CutPrefix(name, "x-aether-subset-"); ok && first(r, name) != "" {
			add(key, first(r, name))
		}
	}
	for _, s := range by {
		if v := first(r, s.header); v != "" {
			add(s.key, v)
		}
	}
	return out
}

// combine: the first four keys of a service do; further ones select alone.
func combine(wants []want, svc *service) bool {
	keys := subsetKeys(svc.rows)
	for _, x := range wants {
		if i := slices.Index(keys, x.key); len(wants) > 1 && i >= 4 {
			return false
		}
	}
	return true
}
