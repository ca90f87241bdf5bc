package admin

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"aether/dataplane"
)

// Bounds of how much of what is open one answer tells: a loop serves nobody while it
// looks at its connections.
const (
	defaultShown = 200
	maxShown     = 2000
)

// Selection chooses among what a node has open. The zero value is the first 200 of all pods.
type Selection struct {
	Pod   string // "namespace/name"; "": of all
	Limit int    // 0: 200; 2000 at most
}

// Values is s as a query.
func (s Selection) Values() url.Values {
	q := url.Values{}
	if s.Pod != "" {
		q.Set("pod", s.Pod)
	}
	if s.Limit != 0 {
		q.Set("limit", strconv.Itoa(s.Limit))
	}
	return q
}

// ParseSelection reads a query. An error says which value is wrong, and what would be right.
func ParseSelection(q url.Values) (Selection, error) {
	s := Selection{Pod: q.Get("pod"), Limit: defaultShown}
	if s.Pod != "" {
		if ns, name, ok := strings.Cut(s.Pod, "/"); !ok || ns == "" || name == "" || strings.Contains(name, "/") {
			return s, fmt.Errorf("pod: %q is not namespace/name, with a pod's name after the slash", s.Pod)
		}
	}
	if l := q.Get("limit"); l != "" {
		n, err := strconv.Atoi(l)
		if err != nil || n < 1 || n > maxShown {
			return s, fmt.Errorf("limit: %q is no number from 1 to %d", l, maxShown)
		}
		s.Limit = n
	}
	return s, nil
}

// selection reads r's; ok: false: the answer has been given.
func selection(w http.ResponseWriter, r *http.Request) (s Selection, ok bool) {
	err := r.ParseForm()
	if err == nil {
		s, err = ParseSelection(r.Form)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return s, false
	}
	return s, true
}

func (a *admin) connections(w http.ResponseWriter, r *http.Request) {
	if s, ok := selection(w, r); ok {
		c := a.Node.Connections(r.Context(), s.Pod, s.Limit)
		answer(w, r, &c, func(out io.Writer) { WriteConnections(out, &c) })
	}
}

func (a *admin) sessions(w http.ResponseWriter, r *http.Request) {
	if s, ok := selection(w, r); ok {
		c := a.Node.Sessions(r.Context(), s.Pod, s.Limit)
		answer(w, r, &c, func(out io.Writer) { WriteSessions(out, &c, time.Now()) })
	}
}

func (a *admin) endpoints(w http.ResponseWriter, r *http.Request) {
	if s, ok := selection(w, r); ok {
		c := a.Node.Endpoints(r.Context(), s.Pod, s.Limit)
		answer(w, r, &c, func(out io.Writer) { WriteEndpoints(out, &c) })
	}
}

func (a *admin) certs(w http.ResponseWriter, r *http.Request) {
	if s, ok := selection(w, r); ok {
		c := a.Node.Certificates(s.Pod, s.Limit)
		answer(w, r, &c, func(out io.Writer) { WriteCertificates(out, &c, time.Now()) })
	}
}

func answer(w http.ResponseWriter, r *http.Request, v any, table func(io.Writer)) {
	if wantsJSON(r) {
		writeJSON(w, v)
		return
	}
	text(w)
	table(w)
}

// table writes rows under a head, in columns.
func table(w io.Writer, head string, rows func(row func(cells ...any))) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.ReplaceAll(head, " ", "\t"))
	rows(func(cells ...any) {
		for i, c := range cells {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			if s := fmt.Sprint(c); s != "" {
				fmt.Fprint(t, s)
			} else {
				fmt.Fprint(t, "-")
			}
		}
		fmt.Fprintln(t)
	})
	_ = t.Flush()
}

// Notes are what is missing in an answer of shown out of total items, a line each; silent
// are loops that did not answer.
func Notes(shown, total int, silent []int) []string {
	var n []string
	if shown < total {
		n = append(n, fmt.Sprintf("%d of %d are shown: ask for more by limit (%d at most), or for one pod", shown, total, maxShown))
	}
	for _, l := range silent {
		n = append(n, fmt.Sprintf("loop %d did not answer: what it carries is missing here; /debug/pprof/goroutine says what it is stuck in", l))
	}
	return n
}

func notes(w io.Writer, lines []string) {
	for _, l := range lines {
		fmt.Fprintf(w, "# %s\n", l)
	}
}

func addr(a netip.AddrPort) string {
	switch {
	case !a.IsValid():
		return ""
	case a.Addr().IsUnspecified(): // inbound: the port is all there is
		return ":" + strconv.Itoa(int(a.Port()))
	}
	return a.String()
}

// short is a duration in milliseconds for people.
func short(ms int64) string {
	d := time.Duration(ms) * time.Millisecond
	switch {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%dd", d/(24*time.Hour))
	case d >= time.Minute:
		return d.Truncate(time.Second).String()
	}
	return d.String()
}

// until is how long it is to t.
func until(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return short(t.Sub(now).Truncate(time.Second).Milliseconds())
}

// WriteConnections writes c for people.
func WriteConnections(w io.Writer, c *dataplane.Connections) {
	table(w, "POD ROLE CLIENT DESTINATION PROTOCOL STATE AGE IDLE REQUESTS STREAMS IN OUT PEER", func(row func(...any)) {
		for _, s := range c.Connections {
			row(s.Pod, s.Role, addr(s.Client), cmp.Or(s.Socket, addr(s.Destination)), s.Protocol, s.State, short(s.AgeMS), short(s.IdleMS), s.Requests, s.Streams, s.BytesIn, s.BytesOut, s.Peer)
		}
	})
	notes(w, Notes(len(c.Connections), c.Total, c.Silent))
}

// WriteSessions writes c for people.
func WriteSessions(w io.Writer, c *dataplane.Sessions, now time.Time) {
	table(w, "POD ENDPOINT PORT STATE STREAMS WAITING REQUESTS AGE IDLE CERTIFICATES IDENTITY PEER", func(row func(...any)) {
		for _, s := range c.Sessions {
			row(s.Pod, addr(s.Endpoint), s.Port, s.State, s.Streams, s.Waiting, s.Requests, short(s.AgeMS), short(s.IdleMS), until(s.Until, now), s.Identity, s.Peer)
		}
	})
	notes(w, Notes(len(c.Sessions), c.Total, c.Silent))
}

// WriteEndpoints writes c for people.
func WriteEndpoints(w io.Writer, c *dataplane.Endpoints) {
	table(w, "POD DESTINATION ENDPOINT OPEN SESSIONS LATENCY TROUBLE EJECTED-FOR EJECTIONS", func(row func(...any)) {
		for _, s := range c.Endpoints {
			latency, ejected := "", ""
			if s.LatencyMS > 0 {
				latency = strconv.FormatFloat(s.LatencyMS, 'f', 1, 64) + "ms"
			}
			if s.EjectedMS > 0 {
				ejected = short(s.EjectedMS)
			}
			row(s.Pod, s.Destination, addr(s.Endpoint), s.Open, s.Sessions, latency, strconv.FormatFloat(s.Trouble, 'f', 1, 64), ejected, s.Ejections)
		}
	})
	notes(w, Notes(len(c.Endpoints), c.Total, c.Silent))
}

// WriteCertificates writes c for people.
func WriteCertificates(w io.Writer, c *dataplane.Certificates, now time.Time) {
	table(w, "POD STATE ENDS-IN AGE SERIAL SPIFFE-ID TRUST-BUNDLE ISSUER", func(row func(...any)) {
		for _, s := range c.Certificates {
			bundle := ""
			if len(s.Bundle) > 0 {
				end := s.Bundle[0].NotAfter
				for _, ca := range s.Bundle {
					if ca.NotAfter.Before(end) {
						end = ca.NotAfter
					}
				}
				bundle = fmt.Sprintf("%d, first ends in %s", len(s.Bundle), until(end, now))
			}
			row(s.Pod, s.State, until(s.NotAfter, now), short(s.AgeMS), s.Serial, s.Wanted, bundle, s.Issuer)
		}
	})
	for _, s := range c.Certificates {
		if s.Failure != "" {
			fmt.Fprintf(w, "%s: cannot be renewed since %s: %s\n", s.Pod, s.FailureSince.Format(time.RFC3339), s.Failure)
		}
	}
	notes(w, Notes(len(c.Certificates), c.Total, nil))
}

// Levels are the names of /loglevel.
var Levels = []string{"debug", "info", "warn", "error"}

func (a *admin) level(w http.ResponseWriter, _ *http.Request) {
	text(w)
	fmt.Fprintln(w, strings.ToLower(a.Level.Level().String()))
}

func (a *admin) setLevel(w http.ResponseWriter, r *http.Request) {
	var l slog.Level
	name := r.FormValue("level")
	if err := l.UnmarshalText([]byte(name)); err != nil || strings.ContainsAny(name, "+-") {
		http.Error(w, fmt.Sprintf("level: there is no %q; the levels are %s", name, strings.Join(Levels, " ")), http.StatusBadRequest)
		return
	}
	a.Level.Set(l)
	a.level(w, r)
}
