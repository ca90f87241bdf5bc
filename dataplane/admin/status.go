package admin

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"aether/controlplane/input"
)

// Bounds of /wait.
const (
	waitTime = 30 * time.Second // unless asked for another
	waitMax  = 10 * time.Minute
)

// ParseWait reads what /wait waits for: "synced", or "seq=N".
func ParseWait(text string) (synced bool, seq uint64, err error) {
	if text == "synced" {
		return true, 0, nil
	}
	if n, ok := strings.CutPrefix(text, "seq="); ok {
		if seq, err := strconv.ParseUint(n, 10, 64); err == nil {
			return false, seq, nil
		}
	}
	return false, 0, fmt.Errorf("for: %q is neither synced nor seq=N", text)
}

func (a *admin) wait(w http.ResponseWriter, r *http.Request) {
	text(w)
	synced, seq, err := ParseWait(r.FormValue("for"))
	timeout := waitTime
	if t := r.FormValue("timeout"); t != "" && err == nil {
		if timeout, err = time.ParseDuration(t); err != nil || timeout <= 0 || timeout > waitMax {
			err = fmt.Errorf("timeout: %q is no time from 1ns to %s", t, waitMax)
		}
	}
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprintln(w, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	err = a.Wait(ctx, synced, seq)
	now := a.Report()
	if err != nil {
		w.WriteHeader(http.StatusGatewayTimeout)
		fmt.Fprintf(w, "not within %s: %s\n", timeout, missing(&now))
		return
	}
	fmt.Fprintln(w, now.Seq)
}

// missing says what is still waited for.
func missing(r *input.Report) string {
	var not []string
	for _, s := range r.Sources {
		if s.Synced {
			continue
		}
		name := s.Name
		if s.Err != "" {
			name += " (" + s.Err + ")"
		}
		not = append(not, name)
	}
	switch len(not) {
	case 0:
		return fmt.Sprintf("state %d is in force", r.Seq)
	case 1:
		return fmt.Sprintf("1 of %d sources has not been heard yet: %s", len(r.Sources), not[0])
	}
	return fmt.Sprintf("%d of %d sources have not been heard yet: %s", len(not), len(r.Sources), strings.Join(not, ", "))
}

// WriteStatus writes s for people.
func WriteStatus(w io.Writer, s *Status, now time.Time) {
	ago := func(t time.Time) string {
		if t.IsZero() {
			return "-"
		}
		return now.Sub(t).Round(time.Second).String()
	}
	if s.Seq == 0 {
		fmt.Fprintf(w, "no state is in force yet: %s\n", missing(&s.Report))
	} else {
		fmt.Fprintf(w, "state %d, since %s\n", s.Seq, ago(s.At))
	}
	if s.StaleSince != nil {
		fmt.Fprintf(w, "STALE: not all is known to be true since %s (%s)\n", s.StaleSince.UTC().Format(time.RFC3339), ago(*s.StaleSince))
	}
	fmt.Fprintln(w)
	table(w, "SOURCE STATE SINCE SERVICES ENDPOINTS OBJECTS ROUTES FILTERS NAMES PODS PROBLEMS CHANGED VERSION", func(row func(...any)) {
		for _, x := range s.Sources {
			state := "waited-for"
			switch {
			case x.Restored:
				state = "restored"
			case x.Synced && x.Connected:
				state = "connected"
			case x.Synced:
				state = "away"
			}
			c := x.Counts
			row(x.Name, state, ago(x.Since), c.Services, c.Endpoints, c.Objects, c.Routes, c.Filters, c.Catalog, c.Workloads, c.Problems, ago(x.Changed), x.Version)
		}
	})
	for _, x := range s.Sources {
		if x.Err != "" {
			fmt.Fprintf(w, "%s: %s\n", x.Name, x.Err)
		}
	}
	if g := s.LastGood; g != nil {
		fmt.Fprintf(w, "\nlast good state %s: ", g.Path)
		if g.Written.IsZero() {
			fmt.Fprint(w, "none yet")
		} else {
			fmt.Fprintf(w, "of %s ago, %d KiB", ago(g.Written), (g.Bytes+1023)>>10)
		}
		if g.Restored {
			fmt.Fprint(w, "; this process started with it")
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	table(w, "POD IDENTITY CERTIFICATE-ENDS-IN CONNECTIONS LOOP CONTAINER", func(row func(...any)) {
		for _, p := range s.Pods {
			row(p.Pod, p.Identity, until(p.CertificateUntil, now), p.Connections, p.Loop, p.Container)
		}
	})
	switch s.ProblemsTotal {
	case 0:
		return
	case 1:
		fmt.Fprint(w, "\n1 problem:\n")
	default:
		fmt.Fprintf(w, "\n%d problems:\n", s.ProblemsTotal)
	}
	for _, p := range s.Problems {
		where := ""
		if p.Where != "" {
			where = " (" + p.Where + ")"
		}
		age := ""
		if !p.Since.IsZero() {
			age = fmt.Sprintf(" (%s old)", ago(p.Since))
		}
		fmt.Fprintf(w, "%s%s: %s%s\n", p.Object, where, p.Reason, age)
	}
	if more := s.ProblemsTotal - len(s.Problems); more > 0 {
		fmt.Fprintf(w, "and %d more\n", more)
	}
}
