package reference_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/decide/reference"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/e2e/counts"
	"aether/e2e/testseed"
)

var (
	seedFlag = flag.Uint64("seed", 0, "seed of the random meshes; 0: of the environment (testseed)")
	soakFlag = flag.Int("cases", 2000, "questions that TestSoak asks")
	keepFlag = flag.Int("keep", 1, "disagreements of different kinds that are looked for before the test ends")
)

const (
	questions = 16 // of one mesh
)

// question is one case: a mesh, a flow, and, of a request, its head.
type question struct {
	Mesh    *model.Mesh
	Flow    model.Flow
	Request *httpmsg.Head // nil: the connection's
	Pick    uint32
}

// answers are what the reference and the product say.
func (q *question) answers() (want, got string) {
	s, _ := compile.Compile(q.Mesh)
	return q.answersOn(s)
}

func (q *question) answersOn(s *snapshot.Snapshot) (want, got string) {
	f := q.Flow
	if q.Request == nil {
		return reference.Connection(q.Mesh, &f, q.Pick).String(), project(&f, nil, decide.Decide(s, &f, q.Pick, nil)).String()
	}
	return reference.Request(q.Mesh, &f, q.Request, q.Pick).String(), project(&f, q.Request, decide.Route(s, &f, q.Request, q.Pick, nil)).String()
}

// project writes a verdict as the reference does.
func project(f *model.Flow, r *httpmsg.Head, v decide.Verdict) reference.Answer {
	a := reference.Answer{
		Action: v.Action.String(), Reason: v.Reason.String(), Race: v.Sniff.Race, Wait: v.Sniff.Wait, HelloOnly: v.Sniff.HelloOnly, Status: v.Status,
	}
	if v.Action == decide.Refuse && r != nil {
		a.Header = v.Reason.Header()
	}
	if v.Action != decide.Refuse && v.Action != decide.Await && v.Pipe != nil && v.Pipe.Authz != nil {
		a.Authz = strings.TrimPrefix(v.Pipe.Authz.Name, "HTTPFilter ")
		if v.Respelled {
			a.AuthzPath = string(v.AuthzPath(r))
		}
	}
	if v.Action == decide.Refuse && r != nil {
		var h httpmsg.Head
		v.MarkAnswer(&h, v.Origin(r))
		a.Response = texts(h.Fields)
	}
	switch v.Action {
	case decide.Deliver:
		a.Deliver = fmt.Sprintf("%d %s", v.Deliver.Port, v.Deliver.Class)
		if v.Deliver.Class == model.HTTP {
			a.Deliver += " " + v.Deliver.App.String()
		}
		if v.Deliver.Socket != nil {
			a.Socket = v.Deliver.Socket.Dir + "/" + v.Deliver.Socket.Pod + "/" + v.Deliver.Socket.File
		}
	case decide.Reply:
		if v.Reason == decide.Redirect {
			a.Location = string(v.Location(nil, f, r))
			sample := reference.SampleResponse()
			v.ApplyResponse(sample, v.Origin(r))
			a.Response = texts(sample.Fields)
		}
		if v.Reason == decide.CORSPreflight {
			var h httpmsg.Head
			v.AppendPreflight(&h, r)
			a.Reply = texts(h.Fields)
		}
	case decide.Forward:
		a.Backend = v.Backend.Name
		a.Endpoints = mayPick(&v)
		if r != nil {
			projectForward(&a, r, &v)
		}
	}
	return a
}

// mayPick are the endpoints that the verdict leaves to pick from.
func mayPick(v *decide.Verdict) (out []string) {
	name := func(e *snapshot.Endpoint) string { return fmt.Sprintf("%s@%d", e.Pod, e.Priority) }
	if v.Pinned != nil {
		return []string{name(v.Pinned)}
	}
	for _, l := range v.Set.Levels() {
		for _, i := range l.Index {
			out = append(out, name(v.Set.At(i)))
		}
	}
	sort.Strings(out)
	return out
}

func projectForward(a *reference.Answer, r *httpmsg.Head, v *decide.Verdict) {
	if v.Matched != nil {
		a.Timeouts = reference.TimeoutsText(v.Matched.Timeouts)
		a.Retry = reference.RetryText(v.Matched.Retry)
		a.Persistence = reference.PersistenceText(v.Matched.Persistence)
	}
	var h httpmsg.Head
	r.CloneInto(&h, nil)
	origin := v.Origin(&h)
	v.ApplyRequest(&h, nil)
	a.Authority, a.Path, a.Request = string(h.Authority), string(h.Path), texts(h.Fields)
	sample := reference.SampleResponse()
	v.ApplyResponse(sample, origin)
	a.Response = texts(sample.Fields)
	if v.Pipe != nil {
		for _, m := range v.Pipe.Mirrors {
			a.Mirrors = append(a.Mirrors, fmt.Sprintf("%s %d/%d", m.Backend.Name, m.Numerator, m.Denominator))
		}
	}
}

func texts(fields []httpmsg.Field) (out []string) {
	sort.SliceStable(fields, func(i, j int) bool { return string(fields[i].Name) < string(fields[j].Name) })
	for _, f := range fields {
		out = append(out, string(f.Name)+"="+string(f.Value))
	}
	return out
}

// ask draws the questions of one mesh.
func (g gen) ask(m *model.Mesh, each func(q *question)) {
	for range questions / 2 {
		f := g.flow(m)
		each(&question{Mesh: m, Flow: f, Pick: g.Uint32()})
		for range 4 { // a request needs a connection that is served, whatever its first authority was
			f, h, aimed := g.aimed(m)
			if !aimed || g.in(2) {
				f = g.flow(m)
				h = g.request(m, &f)
			}
			if f.Dir == model.Captured {
				f.Sniff, f.Host = model.SniffHTTP11, string(h.Authority)
				if g.in(5) {
					f.Host = "x.a." + m.Domain
				}
			}
			a := reference.Connection(m, &f, 0)
			if a.Action == "serve" || a.Action == "deliver" && strings.Contains(a.Deliver, "http") {
				each(&question{Mesh: m, Flow: f, Request: h, Pick: g.Uint32()})
				break
			}
		}
	}
}

// agree asks n questions and reports where the answers part, the smallest mesh
// of each kind that was found.
func agree(t *testing.T, n int) {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = testseed.Seed(t)
	}
	t.Logf("go test ./dataplane/decide/reference -run '^%s$' -seed %d -cases %d repeats it", t.Name(), seed, n)
	var asked, next atomic.Int64
	answers := map[string]int{}
	kinds := map[string]bool{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			own := map[string]int{}
			defer func() {
				mu.Lock()
				defer mu.Unlock()
				for k, v := range own {
					answers[k] += v
				}
			}()
			for asked.Load() < int64(n) {
				i := uint64(next.Add(1))
				g := gen{rand.New(rand.NewPCG(seed, i))}
				m := g.mesh()
				s, _ := compile.Compile(m)
				stop := false
				g.ask(m, func(q *question) {
					if stop {
						return
					}
					asked.Add(1)
					want, got := q.answersOn(s)
					head, _, _ := strings.Cut(want, "\n")
					own[head]++
					if want == got {
						return
					}
					stop = true
					mu.Lock()
					kind := difference(want, got)
					known := kinds[kind] || len(kinds) >= *keepFlag
					kinds[kind] = true
					mu.Unlock()
					if !known {
						small := shrink(q, (*question).answers)
						w, got := small.answers()
						t.Errorf("mesh %d of seed %d\n%s\nreference: %s\nproduct:   %s", i, seed, small, w, got)
					}
				})
				mu.Lock()
				enough := len(kinds) >= *keepFlag
				mu.Unlock()
				if enough {
					return
				}
			}
		})
	}
	wg.Wait()
	logCounts(t, answers, seed)
}

func logCounts(t *testing.T, answers map[string]int, seed uint64) {
	t.Helper()
	var lines []string
	total := 0
	for k, v := range answers {
		lines = append(lines, fmt.Sprintf("%8d %s", v, k))
		total += v
	}
	sort.Sort(sort.Reverse(sort.StringSlice(lines)))
	t.Logf("by the reference's answer:\n%s", strings.Join(lines, "\n"))
	if !t.Failed() {
		counts.Say(t, "%d questions of random meshes (seed %d), answered by decide as by the reference", total, seed)
	}
}

// TestAgreement: what is compiled and decided is what the contract says, as the
// reference reads it.
func TestAgreement(t *testing.T) { agree(t, testseed.Count(5000, 20000)) }

// TestSoak is TestAgreement for as long as one likes (make soak-decide).
func TestSoak(t *testing.T) { agree(t, *soakFlag) }
