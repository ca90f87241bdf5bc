package admin

import (
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Filter chooses among a node's last decisions. The zero value chooses none; Lines has to be set.
type Filter struct {
	Lines   int      // at most, the newest
	Bad     bool     // refusals and failures only
	Pod     string   // "namespace/name": of a pod, or where none has this name of a ServiceAccount; empty: of all
	Reasons []string // one of these; empty: any
	Service string   // "namespace/name": to it, or with a Host that names it; empty: to anything
}

const defaultLines = 50

// Values is f as a query of /why.
func (f Filter) Values() url.Values {
	q := url.Values{"n": {strconv.Itoa(f.Lines)}}
	for name, value := range map[string]string{"pod": f.Pod, "reason": strings.Join(f.Reasons, ","), "service": f.Service} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if f.Bad {
		q.Set("bad", "1")
	}
	return q
}

// ParseFilter reads a query of /why. An error says which value is wrong, and what would be right.
func ParseFilter(q url.Values) (Filter, error) {
	f := Filter{Lines: defaultLines, Pod: q.Get("pod"), Service: q.Get("service")}
	if s := q.Get("n"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return f, fmt.Errorf("n: %q is no positive number", s)
		}
		f.Lines = n
	}
	switch s := q.Get("bad"); s {
	case "", "0", "false":
	case "1", "true":
		f.Bad = true
	default:
		return f, fmt.Errorf("bad: %q is neither 1 nor 0", s)
	}
	for _, p := range []struct{ name, value, what string }{
		{"pod", f.Pod, "a pod's name or its ServiceAccount's"}, {"service", f.Service, "a service's name"},
	} {
		ns, name, ok := strings.Cut(p.value, "/")
		if p.value != "" && (!ok || ns == "" || name == "" || strings.Contains(name, "/")) {
			return f, fmt.Errorf("%s: %q is not namespace/name, with %s after the slash", p.name, p.value, p.what)
		}
	}
	if s := q.Get("reason"); s != "" {
		f.Reasons = strings.Split(s, ",")
		known := make([]string, 0, 64)
		for _, r := range decide.Reasons() {
			known = append(known, r.String())
		}
		for _, r := range f.Reasons {
			if !slices.Contains(known, r) {
				slices.Sort(known)
				return f, fmt.Errorf("reason: there is no %q; the reasons are %s", r, strings.Join(known, " "))
			}
		}
	}
	return f, nil
}

// choose gives the entries of ring that f asks for, the newest first. s tells which
// pod has which ServiceAccount and which name means which service.
func (f Filter) choose(ring *journal.Ring, s *snapshot.Snapshot) []journal.Entry {
	all := ring.Last(math.MaxInt, f.Bad)
	out := all[:0]
	ns, name, _ := strings.Cut(f.Pod, "/")
	byPod := slices.ContainsFunc(s.Workloads(), func(w *snapshot.Workload) bool { return w.Service.Namespace == ns && w.Pod == name })
	for i := range all {
		byPod = byPod || all[i].Pod == name && all[i].Namespace == ns // one that is gone by now
	}
	for i := range all {
		e := &all[i]
		if len(out) == f.Lines {
			break
		}
		who := e.Workload
		if byPod { // a pod's name comes first: it says more than its ServiceAccount
			who = e.Pod
		}
		if f.Pod != "" && (ns != e.Namespace || name != who) ||
			len(f.Reasons) > 0 && !slices.Contains(f.Reasons, e.Reason) ||
			f.Service != "" && !concerns(e, f.Service, s) {
			continue
		}
		out = append(out, *e)
	}
	return out
}

// concerns reports whether e is about service: it went there, or asked for it.
func concerns(e *journal.Entry, service string, s *snapshot.Snapshot) bool {
	if strings.HasPrefix(e.Backend, service+":") {
		return true
	}
	if e.Dir == model.Inbound {
		return service == e.Namespace+"/"+e.Workload
	}
	if e.Rule == "Service "+service || e.Rule == "ServiceAccount "+service {
		return true
	}
	if svc := snapshot.Name(s, e.Host.String(), e.Namespace).Service; svc != nil {
		return svc.Name.String() == service
	}
	svc := s.Address(e.Dst.Addr())
	return svc != nil && svc.Name.String() == service
}

// Decision is one of a node's last decisions in JSON. The names are a promise to scripts; new
// ones may be added.
type Decision struct {
	At      time.Time `json:"at"`
	TookMS  float64   `json:"took_ms"`
	Kind    string    `json:"kind"` // "request" or "connection"
	Pod     string    `json:"pod"`  // namespace and ServiceAccount
	PodName string    `json:"pod_name,omitempty"`
	// Container is the ID of the pod's sandbox: two pods may have had one name.
	Container string `json:"container,omitempty"`
	Flow      string `json:"flow"`              // an argument for explain
	Request   string `json:"request,omitempty"` // an argument for explain, without fields; a long part of it is cut
	Action    string `json:"action"`
	Reason    string `json:"reason"`
	Rule      string `json:"rule,omitempty"`
	// AuditFilter is the first filter in mode AUDIT that would have denied the request, AuditPolicy its policy that held, if one did.
	AuditFilter string `json:"audit_filter,omitempty"`
	AuditPolicy string `json:"audit_policy,omitempty"`
	Status      int    `json:"status,omitempty"`
	// Backend is the service and port that it went to, Endpoint the pod's address, Peer its
	// identity; of what came in, the caller's.
	Backend  string `json:"backend,omitempty"`
	Endpoint string `json:"endpoint,omitempty"`
	Peer     string `json:"peer,omitempty"`
	BytesIn  int64  `json:"bytes_in"`
	BytesOut int64  `json:"bytes_out"`
	Attempts int    `json:"attempts,omitempty"`
	Ended    string `json:"ended,omitempty"`
	Cause    string `json:"cause,omitempty"`
	// Fault is what was wrong with a message that could not be read: the field, the byte or the limit.
	Fault   string `json:"fault,omitempty"`
	Outcome string `json:"outcome,omitempty"`
	// Flags are Envoy's response flags, and Details its response_code_details.
	Flags    string `json:"flags"`
	Details  string `json:"details,omitempty"`
	Bad      bool   `json:"bad"`      // a refusal or a failure
	Snapshot uint64 `json:"snapshot"` // version of the snapshot that decided
}

func decisionOf(e *journal.Entry) Decision {
	f := model.Flow{
		Namespace: e.Namespace, Workload: e.Workload, Dir: e.Dir, Dst: model.OrigDst{AddrPort: e.Dst}, Sniff: e.Sniff, Host: e.Host.String(),
	}
	if e.Dir == model.Inbound {
		f.Peer = e.Peer
	}
	d := Decision{
		At: e.At.UTC(), TookMS: float64(e.Took.Microseconds()) / 1000, Kind: "connection", Pod: e.Namespace + "/" + e.Workload, PodName: e.Pod, Container: e.Container,
		Flow: f.String(), Action: e.Action, Reason: e.Reason, Rule: e.Rule, AuditFilter: e.AuditFilter, AuditPolicy: e.AuditPolicy, Status: e.Status, Backend: e.Backend, Peer: e.Peer,
		BytesIn: e.BytesIn, BytesOut: e.BytesOut, Attempts: e.Attempts, Ended: e.Ended, Cause: e.Cause, Fault: e.Fault, Outcome: e.Outcome.String(),
		Flags: e.Flags.String(), Details: e.Details, Bad: e.Bad(), Snapshot: e.Version,
	}
	if e.Request {
		h := httpmsg.Head{Method: []byte(e.Method.String()), Authority: []byte(e.Host.String()), Path: []byte(e.Path.String())}
		d.Kind, d.Request = "request", model.RequestString(&h)
	}
	if e.Endpoint.IsValid() {
		d.Endpoint = e.Endpoint.String()
	} else {
		d.Endpoint = e.Socket
	}
	return d
}

func (a *admin) why(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		http.Error(w, "query: "+err.Error(), http.StatusBadRequest)
		return
	}
	f, err := ParseFilter(r.Form)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	entries := f.choose(a.Why, a.Node.Snapshot())
	if wantsJSON(r) {
		out := make([]Decision, len(entries))
		for i := range entries {
			out[i] = decisionOf(&entries[i])
		}
		writeJSON(w, out)
		return
	}
	text(w)
	for i := range entries {
		fmt.Fprintln(w, entries[i].String())
	}
}
