package file

import (
	"context"

	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
)

// Feed is Watch for the control loop: it tells sink the whole state once and then what
// differs, key by key, until ctx ends. base are the settings where no MeshConfig says any.
// A MeshConfig that is refused says what it said before. Where a document cannot be read that may be a
// policy, and it is not known what was in force before, nothing is told but that.
func Feed(ctx context.Context, dir string, o Options, base input.Settings, sink input.Sink) error {
	var last *input.Batch
	var down string // why the directory cannot be read, as told
	var good meshConfigs
	return observe(ctx, dir, o, func(s *source, problems []model.Problem) {
		if last == nil && s.before == nil {
			// Who asked for nothing more than what can be read would open what the rest closes.
			if why := s.unsure(); why != "" {
				if why != down {
					sink.Report(input.Status{Err: why})
					down = why
				}
				return
			}
		}
		next := input.FullBatch(s.mesh, problems, base)
		good = s.configs.after(good)
		good.say(&next, s.configs.mesh != nil, base)
		if o.OnPods != nil {
			next.Endpoints, next.Workloads = nil, nil
		}
		why := ""
		if s.err != nil {
			why = dirProblem(dir, s.err).Reason
		}
		if last == nil || why != down {
			sink.Report(input.Status{Connected: s.err == nil, Err: why})
			down = why
		}
		if last == nil {
			sink.Replace(next)
		} else if d := last.Diff(&next, base); !d.Empty() {
			sink.Apply(d)
		}
		last = &next
		if o.OnPods != nil {
			o.OnPods(Local{Pods: s.pods, Locality: *next.Locality, Partial: !s.whole})
		}
	})
}

// after is c with what was good before in the place of what is refused.
func (c meshConfigs) after(before meshConfigs) meshConfigs {
	if m, was := c.mesh, before.mesh; m != nil {
		if was != nil && (was.Namespace != m.Namespace || was.Name != m.Name) {
			was = nil // another's words are not what was asked for
		}
		c.mesh = m.Good(was)
	}
	of := make(map[string]*gamma.Mesh, len(c.of))
	for ns, m := range c.of {
		if m = m.Good(before.of[ns]); m != nil {
			of[ns] = m
		}
	}
	c.of = of
	return c
}

// say puts the settings of good configs into a whole state; some: the mesh has one, good or not.
func (c meshConfigs) say(b *input.Batch, some bool, base input.Settings) {
	b.Settings = nil
	if c.mesh != nil {
		settings := c.mesh.Over(base)
		b.Settings = &settings
	}
	b.KeepSettings = some && c.mesh == nil
	b.Namespaces = make(map[string][]input.Override, len(c.of))
	for ns, m := range c.of {
		b.Namespaces[ns] = []input.Override{m.Override()}
	}
}
