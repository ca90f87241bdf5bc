package file

import (
	"context"

	"aether/controlplane/input"
	"aether/dataplane/model"
)

// Feed is Watch for the control loop: it tells sink the whole state once and then what
// differs, key by key, until ctx ends. base are the settings where no MeshConfig says any.
func Feed(ctx context.Context, dir string, o Options, base input.Settings, sink input.Sink) error {
	var last *input.Batch
	var down string // why the directory cannot be read, as told
	return observe(ctx, dir, o, func(m *model.Mesh, pods []Pod, problems []model.Problem, err error) {
		next := input.Whole(m, problems, base)
		if o.OnPods != nil {
			next.Endpoints, next.Workloads = nil, nil
		}
		why := ""
		if err != nil {
			why = dirProblem(dir, err).Reason
		}
		if last == nil || why != down {
			sink.Report(input.Status{Connected: err == nil, Err: why})
			down = why
		}
		if last == nil {
			sink.Replace(next)
		} else if d := last.Diff(&next, base); !d.Empty() {
			sink.Apply(d)
		}
		last = &next
		if o.OnPods != nil {
			o.OnPods(Local{pods, *next.Locality})
		}
	})
}
